// What torch (lazily) and Triton ask of the CUDA driver, on top of the fake runtime.
#include <cuda_runtime_api.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <map>
#include <mutex>
#include <string>
#include <utility>
#include "simulation.h"
#define EXPORT extern "C" __attribute__((visibility("default")))
extern "C" int simulated_has_context(int);
extern "C" int simulated_missing(const char*);
typedef int R;
static thread_local void* current = nullptr;
static void* context_of(int d) { return (void*)(uintptr_t)(0xc0de0000u + (unsigned)d * 16); }
static int device_of(void* c) { return c ? (int)(((uintptr_t)c - 0xc0de0000u) / 16) : simulated_device(); }
EXPORT R cuInit(unsigned) { return simulated_device_count() ? 0 : 100; }
EXPORT R cuDriverGetVersion(int* v) { *v = CUDART_VERSION; return 0; }
EXPORT R cuGetErrorString(R r, const char** s) { *s = r ? cudaGetErrorString((cudaError_t)r) : "no error"; return 0; }
EXPORT R cuGetErrorName(R r, const char** s) { *s = cudaGetErrorName((cudaError_t)r); return 0; }
EXPORT R cuDeviceGet(int* d, int i) { if (i < 0 || i >= simulated_device_count()) return 101; *d = i; return 0; }
EXPORT R cuDeviceGetCount(int* n) { *n = simulated_device_count(); return 0; }
EXPORT R cuDeviceGetName(char* s, int n, int) { snprintf(s, n, "Fake GPU"); return 0; }
EXPORT R cuDeviceGetAttribute(int* v, int a, int d) { return cudaDeviceGetAttribute(v, (cudaDeviceAttr)a, d); }
EXPORT R cuDeviceTotalMem_v2(size_t* n, int) { *n = 80ull << 30; return 0; }
EXPORT R cuDeviceComputeCapability(int* a, int* b, int d) { cudaDeviceGetAttribute(a, cudaDevAttrComputeCapabilityMajor, d); return cudaDeviceGetAttribute(b, cudaDevAttrComputeCapabilityMinor, d); }
EXPORT R cuDeviceGetUuid(char* u, int d) { memset(u, d + 1, 16); return 0; }
EXPORT R cuDeviceGetUuid_v2(char* u, int d) { return cuDeviceGetUuid(u, d); }
EXPORT R cuDevicePrimaryCtxGetState(int d, unsigned* f, int* on) { *f = 0; *on = simulated_has_context(d); return 0; }
EXPORT R cuDevicePrimaryCtxRetain(void** c, int d) { *c = context_of(d); return 0; }
EXPORT R cuDevicePrimaryCtxRelease_v2(int) { return 0; }
EXPORT R cuCtxGetCurrent(void** c) { *c = simulated_has_context(simulated_device()) ? context_of(simulated_device()) : nullptr; return 0; }
EXPORT R cuCtxSetCurrent(void* c) { current = c; return c ? (R)cudaSetDevice(device_of(c)) : 0; }
EXPORT R cuCtxPushCurrent_v2(void* c) { return cuCtxSetCurrent(c); }
EXPORT R cuCtxPopCurrent_v2(void** c) { return cuCtxGetCurrent(c); }
EXPORT R cuCtxGetDevice(int* d) { *d = simulated_device(); return 0; }
EXPORT R cuCtxSynchronize() { return cudaDeviceSynchronize(); }
struct Function { std::string name; int shared = 48 * 1024; };
EXPORT R cuModuleLoadData(void** m, const void*) { *m = malloc(16); return 0; }
EXPORT R cuModuleLoadDataEx(void** m, const void*, unsigned, void*, void**) { *m = malloc(16); return 0; }
EXPORT R cuModuleLoad(void** m, const char*) { *m = malloc(16); return 0; }
EXPORT R cuModuleUnload(void*) { return 0; }
EXPORT R cuModuleGetFunction(void** f, void*, const char* name) { *f = new Function{name}; return 0; }
EXPORT R cuModuleGetGlobal_v2(void** p, size_t* n, void*, const char*) { *p = calloc(1, 1 << 16); if (n) *n = 1 << 16; return 0; }
EXPORT R cuLibraryLoadData(void** m, const void*, void*, void**, unsigned, void*, void**, unsigned) { *m = malloc(16); return 0; }
EXPORT R cuLinkCreate_v2(unsigned, void*, void**, void** s) { *s = malloc(16); return 0; }
EXPORT R cuLinkAddData_v2(void*, int, void*, size_t, const char*, unsigned, void*, void**) { return 0; }
EXPORT R cuLinkComplete(void*, void** c, size_t* n) { *c = calloc(1, 16); *n = 16; return 0; }
EXPORT R cuLinkDestroy(void*) { return 0; }
EXPORT R cuFuncGetAttribute(int* v, int a, void* f) {
  switch (a) { case 0: *v = 1024; break; case 4: *v = 32; break; case 5: case 6: *v = 90; break; case 8: *v = ((Function*)f)->shared; break; default: *v = 0; }
  return 0;
}
EXPORT R cuFuncSetAttribute(void* f, int a, int v) { if (a == 8) { if (v > 227 * 1024) return 1; ((Function*)f)->shared = v; } return 0; }
EXPORT R cuFuncSetCacheConfig(void*, int) { return 0; }
static R launch(void* f, unsigned gx, unsigned gy, unsigned gz, unsigned bx, unsigned by, unsigned bz, unsigned shared, void* s) {
  if (!f) return 400;
  if (!gx || !gy || !gz || !bx || !by || !bz || gy > 65535 || gz > 65535 || (size_t)bx * by * bz > 1024 || shared > (unsigned)((Function*)f)->shared) return 1;
  if (simulated_trace()) simulated_tracef("driver kernel %s", ((Function*)f)->name.c_str());
  return simulated_driver_launch(s, ((Function*)f)->name.c_str());
}
EXPORT R cuLaunchKernel(void* f, unsigned gx, unsigned gy, unsigned gz, unsigned bx, unsigned by, unsigned bz, unsigned sh, void* s, void**, void**) { SIMULATED_COUNT("calls/cuLaunchKernel"); return launch(f, gx, gy, gz, bx, by, bz, sh, s); }
EXPORT R cuLaunchCooperativeKernel(void* f, unsigned gx, unsigned gy, unsigned gz, unsigned bx, unsigned by, unsigned bz, unsigned sh, void* s, void**) { return launch(f, gx, gy, gz, bx, by, bz, sh, s); }
struct LaunchConfig { unsigned gx, gy, gz, bx, by, bz, shared; void* stream; void* attrs; unsigned n; };
EXPORT R cuLaunchKernelEx(const LaunchConfig* c, void* f, void**, void**) { SIMULATED_COUNT("calls/cuLaunchKernelEx"); return launch(f, c->gx, c->gy, c->gz, c->bx, c->by, c->bz, c->shared, c->stream); }
EXPORT R cuOccupancyMaxActiveBlocksPerMultiprocessor(int* n, void*, int block, size_t) { *n = block > 0 ? 2048 / block : 0; return 0; }
EXPORT R cuOccupancyMaxActiveClusters(int* n, void*, const void*) { *n = 8; return 0; }
EXPORT R cuPointerGetAttribute(void* data, int a, unsigned long long p) {
  cudaPointerAttributes x;
  cudaPointerGetAttributes(&x, (void*)p);
  if (x.type == cudaMemoryTypeUnregistered) return 1;
  switch (a) {
    case 1: *(void**)data = context_of(x.device); break;
    case 2: *(unsigned*)data = x.type == cudaMemoryTypeHost ? 1 : 2; break;
    case 3: *(unsigned long long*)data = p; break;
    case 4: *(void**)data = (void*)p; break;
    case 9: *(int*)data = x.device; break;
    default: *(unsigned*)data = 0;
  }
  return 0;
}
EXPORT R cuTensorMapEncodeTiled(...) { return 0; }
EXPORT R cuTensorMapEncodeIm2col(...) { return 0; }
EXPORT R cuStreamSynchronize(cudaStream_t s) { return cudaStreamSynchronize(s); }
EXPORT R cuStreamGetCtx(cudaStream_t, void** c) { return cuCtxGetCurrent(c); }
EXPORT R cuMemAlloc_v2(void** p, size_t n) { return cudaMalloc(p, n); }
EXPORT R cuMemFree_v2(void* p) { return cudaFree(p); }
EXPORT R cuMemcpyHtoD_v2(void* d, const void* s, size_t n) { return cudaMemcpy(d, s, n, cudaMemcpyHostToDevice); }
EXPORT R cuMemcpyDtoH_v2(void* d, const void* s, size_t n) { return cudaMemcpy(d, s, n, cudaMemcpyDeviceToHost); }
EXPORT R cuMemcpyDtoHAsync_v2(void* d, const void* s, size_t n, cudaStream_t st) { return cudaMemcpyAsync(d, s, n, cudaMemcpyDeviceToHost, st); }
EXPORT R cuMemcpyHtoDAsync_v2(void* d, const void* s, size_t n, cudaStream_t st) { return cudaMemcpyAsync(d, s, n, cudaMemcpyHostToDevice, st); }
EXPORT R cuMemsetD32Async(void* p, unsigned v, size_t n, cudaStream_t) { for (size_t i = 0; i < n; ++i) ((unsigned*)p)[i] = v; return 0; }
EXPORT R cuMemsetD32_v2(void* p, unsigned v, size_t n) { return cuMemsetD32Async(p, v, n, nullptr); }
EXPORT R cuMemGetAllocationGranularity(size_t* n, const void*, int) { *n = 2 << 20; return 0; }
EXPORT R cuMemGetHandleForAddressRange(void*, unsigned long long, size_t, int, unsigned long long) { return 801; }
EXPORT R cuLogsRegisterCallback(void*, void*, void** h) { if (h) *h = nullptr; return 0; }
EXPORT R cuLogsUnregisterCallback(void*) { return 0; }
// Functions that are not here: each says its name when it is called.
static const char* unknown_names[128];
template <int I> static R unknown(...) { return simulated_missing(unknown_names[I]); }
template <int... I> static void** table(std::integer_sequence<int, I...>) { static void* t[] = {(void*)unknown<I>...}; return t; }
EXPORT void* simulated_driver_stub(const char* name) {
  static std::mutex m;
  static int n = 0;
  std::lock_guard<std::mutex> g(m);
  void** t = table(std::make_integer_sequence<int, 128>());
  for (int i = 0; i < n; ++i) if (!strcmp(unknown_names[i], name)) return t[i];
  if (n == 128) return nullptr;
  unknown_names[n] = strdup(name);
  return t[n++];
}
EXPORT R cuGetProcAddress_v2(const char* name, void** p, int v, unsigned long long flags, int* found) {
  cudaDriverEntryPointQueryResult r;
  cudaGetDriverEntryPoint(name, p, flags, &r);
  if (found) *found = *p ? 0 : 1;
  return *p ? 0 : 500;
}
