// Devices, their properties, errors, and what torch looks up in the driver.

#include <dlfcn.h>

#include <cstdio>
#include <cstring>
#include <set>
#include <utility>

#include "runtime.h"

namespace simulated {

std::recursive_mutex& mutex() {
  static auto* made = new std::recursive_mutex;
  return *made;
}

static const int VERSION = CUDART_VERSION;
static const size_t MEMORY = 80ull << 30;

thread_local int current_device = 0;
static thread_local Error last_error = cudaSuccess;
static std::atomic<bool> contexts[MOST_DEVICES];
static std::set<std::pair<int, int>> peers;  // that may access memory of the second

/// As many as CUDA_VISIBLE_DEVICES leaves of SIMULATED_GPUS.
static int count_devices() {
  int all = std::min((int)simulated_setting("SIMULATED_GPUS", 2), MOST_DEVICES);
  const char* rest = getenv("CUDA_VISIBLE_DEVICES");
  if (!rest) return all;
  int visible = 0;
  for (char* end; *rest; rest = *end == ',' ? end + 1 : end) {
    long index = strtol(rest, &end, 10);
    if (end == rest || index < 0 || index >= all) break;  // as CUDA, which ignores what follows
    ++visible;
    if (*end && *end != ',') break;
  }
  return visible;
}

int device_count() {
  static int number = count_devices();
  return number;
}

static void check_device(int device) {
  require(0 <= device && device < device_count(), cudaErrorInvalidDevice);
}

// -- errors, and processes that were forked ----------------------------------------------------

static std::atomic<bool> is_used{false}, is_forked{false};

void use_device() {
  contexts[current_device] = true;
  if (!is_used.exchange(true)) pthread_atfork(nullptr, nullptr, [] { is_forked = true; });
}

void entered(const char* function, std::atomic<long long>*& calls) {
  if (!calls) calls = counter(std::string("calls/") + function);
  calls->fetch_add(1, std::memory_order_relaxed);
  simulated_trace("%s", function);
  require(!is_forked, cudaErrorInitializationError);
}

Error failed(const char* function, Error error) {
  if (error == cudaErrorNotReady) return error;  // an answer
  last_error = error;
  auto what = std::string(function) + ": " + cudaGetErrorName(error);
  count("errors/" + what);
  note("error " + what);
  simulated_trace("error in %s", what.c_str());
  return error;
}

struct Text {
  Error error;
  const char *name, *text;
};

#define TEXT(name, text) {name, #name, text}
static const Text TEXTS[] = {
    TEXT(cudaSuccess, "no error"),
    TEXT(cudaErrorInvalidValue, "invalid argument"),
    TEXT(cudaErrorMemoryAllocation, "out of memory"),
    TEXT(cudaErrorInitializationError, "initialization error"),
    TEXT(cudaErrorInvalidConfiguration, "invalid configuration argument"),
    TEXT(cudaErrorInvalidSymbol, "invalid device symbol"),
    TEXT(cudaErrorMissingConfiguration, "__global__ function call is not configured"),
    TEXT(cudaErrorInvalidDeviceFunction, "invalid device function"),
    TEXT(cudaErrorNoDevice, "no CUDA-capable device is detected"),
    TEXT(cudaErrorInvalidDevice, "invalid device ordinal"),
    TEXT(cudaErrorInvalidResourceHandle, "invalid resource handle"),
    TEXT(cudaErrorIllegalState, "the operation cannot be performed in the present state"),
    TEXT(cudaErrorNotReady, "device not ready"),
    TEXT(cudaErrorPeerAccessAlreadyEnabled, "peer access is already enabled"),
    TEXT(cudaErrorNotSupported, "operation not supported"),
    TEXT(cudaErrorStreamCaptureUnsupported, "operation not permitted when stream is capturing"),
    TEXT(cudaErrorStreamCaptureInvalidated, "operation failed due to a previous error during capture"),
    TEXT(cudaErrorStreamCaptureMerge, "operation would result in a merge of separate captures"),
    TEXT(cudaErrorStreamCaptureUnmatched, "capture was not ended in the same stream as it began"),
    TEXT(cudaErrorStreamCaptureUnjoined, "capturing stream has unjoined work"),
    TEXT(cudaErrorStreamCaptureIsolation, "dependency created on uncaptured work in another stream"),
    TEXT(cudaErrorStreamCaptureImplicit, "operation would depend on uncaptured work of a stream"),
    TEXT(cudaErrorCapturedEvent, "operation not permitted on an event last recorded in a capture"),
    TEXT(cudaErrorStreamCaptureWrongThread, "a capture is to be ended by the thread that began it"),
};

static const Text& text_of(Error error) {
  static const Text other{cudaErrorUnknown, "cudaErrorUnknown", "unknown error"};
  for (auto& text : TEXTS)
    if (text.error == error) return text;
  return other;
}

static int attribute(cudaDeviceAttr asked, int device) {
  switch (asked) {
    case cudaDevAttrMaxThreadsPerBlock:
    case cudaDevAttrMaxBlockDimX:
    case cudaDevAttrMaxBlockDimY: return 1024;
    case cudaDevAttrMaxBlockDimZ: return 64;
    case cudaDevAttrMaxGridDimX: return 2147483647;
    case cudaDevAttrMaxGridDimY:
    case cudaDevAttrMaxGridDimZ: return 65535;
    case cudaDevAttrMaxSharedMemoryPerBlock: return 48 * 1024;
    case cudaDevAttrMaxSharedMemoryPerBlockOptin: return 227 * 1024;
    case cudaDevAttrMaxSharedMemoryPerMultiprocessor: return 228 * 1024;
    case cudaDevAttrReservedSharedMemoryPerBlock: return 1024;
    case cudaDevAttrWarpSize: return 32;
    case cudaDevAttrMultiProcessorCount: return 132;
    case cudaDevAttrMaxThreadsPerMultiProcessor: return 2048;
    case cudaDevAttrMaxRegistersPerBlock:
    case cudaDevAttrMaxRegistersPerMultiprocessor: return 65536;
    case cudaDevAttrMaxBlocksPerMultiprocessor: return 32;
    case cudaDevAttrComputeCapabilityMajor: return 9;
    case cudaDevAttrComputeCapabilityMinor: return 0;
    case cudaDevAttrL2CacheSize: return 50 << 20;
    case cudaDevAttrTotalConstantMemory: return 65536;
    case cudaDevAttrTextureAlignment: return 512;
    case cudaDevAttrMaxPitch: return 2147483647;
    case cudaDevAttrAsyncEngineCount: return 3;
    case cudaDevAttrPciBusId: return device + 1;
    case cudaDevAttrConcurrentKernels:
    case cudaDevAttrUnifiedAddressing:
    case cudaDevAttrCooperativeLaunch:
    case cudaDevAttrStreamPrioritiesSupported:
    case cudaDevAttrCanMapHostMemory: return 1;
    default: return 0;
  }
}

}  // namespace simulated

using namespace simulated;

API int simulated_device() { return current_device; }
API int simulated_device_count() { return device_count(); }
API int simulated_has_context(int device) { return contexts[device]; }

API cudaError_t cudaGetDeviceCount(int* number) try {
  *number = device_count();
  require(!is_forked, cudaErrorInitializationError);
  require(*number, cudaErrorNoDevice);
  return cudaSuccess;
} OR_ERROR

API cudaError_t cudaGetDevice(int* device) {
  *device = current_device;
  return cudaSuccess;
}

API cudaError_t cudaSetDevice(int device) try {
  ENTER();
  check_device(device);
  current_device = device;
  use_device();
  return cudaSuccess;
} OR_ERROR

API cudaError_t cudaDeviceGetAttribute(int* value, cudaDeviceAttr asked, int device) try {
  ENTER();
  check_device(device);
  *value = attribute(asked, device);
  return cudaSuccess;
} OR_ERROR

API cudaError_t cudaGetDeviceProperties(cudaDeviceProp* p, int device) try {
  ENTER();
  check_device(device);
  auto value = [device](cudaDeviceAttr asked) { return attribute(asked, device); };
  memset(p, 0, sizeof *p);
  snprintf(p->name, sizeof p->name, "Simulated GPU");
  for (int i = 0; i < 16; ++i) p->uuid.bytes[i] = (char)(i + device + 1);
  p->totalGlobalMem = MEMORY;
  p->sharedMemPerBlock = value(cudaDevAttrMaxSharedMemoryPerBlock);
  p->sharedMemPerBlockOptin = value(cudaDevAttrMaxSharedMemoryPerBlockOptin);
  p->sharedMemPerMultiprocessor = value(cudaDevAttrMaxSharedMemoryPerMultiprocessor);
  p->reservedSharedMemPerBlock = value(cudaDevAttrReservedSharedMemoryPerBlock);
  p->regsPerBlock = p->regsPerMultiprocessor = value(cudaDevAttrMaxRegistersPerBlock);
  p->warpSize = value(cudaDevAttrWarpSize);
  p->memPitch = value(cudaDevAttrMaxPitch);
  p->maxThreadsPerBlock = value(cudaDevAttrMaxThreadsPerBlock);
  p->maxThreadsPerMultiProcessor = value(cudaDevAttrMaxThreadsPerMultiProcessor);
  p->maxBlocksPerMultiProcessor = value(cudaDevAttrMaxBlocksPerMultiprocessor);
  p->maxThreadsDim[0] = p->maxThreadsDim[1] = value(cudaDevAttrMaxBlockDimX);
  p->maxThreadsDim[2] = value(cudaDevAttrMaxBlockDimZ);
  p->maxGridSize[0] = value(cudaDevAttrMaxGridDimX);
  p->maxGridSize[1] = p->maxGridSize[2] = value(cudaDevAttrMaxGridDimY);
  p->totalConstMem = value(cudaDevAttrTotalConstantMemory);
  p->major = value(cudaDevAttrComputeCapabilityMajor);
  p->minor = value(cudaDevAttrComputeCapabilityMinor);
  p->textureAlignment = value(cudaDevAttrTextureAlignment);
  p->multiProcessorCount = value(cudaDevAttrMultiProcessorCount);
  p->l2CacheSize = value(cudaDevAttrL2CacheSize);
  p->asyncEngineCount = value(cudaDevAttrAsyncEngineCount);
  p->pciBusID = value(cudaDevAttrPciBusId);
  p->canMapHostMemory = p->concurrentKernels = p->unifiedAddressing = p->cooperativeLaunch = 1;
  p->streamPrioritiesSupported = 1;
  return cudaSuccess;
} OR_ERROR

API cudaError_t cudaDeviceGetPCIBusId(char* id, int size, int device) {
  snprintf(id, size, "0000:%02X:00.0", device + 1);
  return cudaSuccess;
}

API cudaError_t cudaDeviceGetStreamPriorityRange(int* least, int* greatest) {
  if (least) *least = 0;
  if (greatest) *greatest = -5;
  return cudaSuccess;
}

API cudaError_t cudaDeviceCanAccessPeer(int* can, int device, int peer) try {
  ENTER();
  check_device(device), check_device(peer);
  *can = device != peer;
  return cudaSuccess;
} OR_ERROR

API cudaError_t cudaDeviceEnablePeerAccess(int peer, unsigned) try {
  ENTER();
  unsafe_in_captures();
  Guard guard(mutex());
  require(peers.insert({current_device, peer}).second, cudaErrorPeerAccessAlreadyEnabled);
  return cudaSuccess;
} OR_ERROR

API cudaError_t cudaGetLastError() { return std::exchange(last_error, cudaSuccess); }
API cudaError_t cudaPeekAtLastError() { return last_error; }
API const char* cudaGetErrorName(cudaError_t error) { return text_of(error).name; }
API const char* cudaGetErrorString(cudaError_t error) { return text_of(error).text; }

API cudaError_t cudaRuntimeGetVersion(int* version) {
  *version = VERSION;
  return cudaSuccess;
}
API cudaError_t cudaDriverGetVersion(int* version) { return cudaRuntimeGetVersion(version); }
API cudaError_t cudaProfilerStart() { return cudaSuccess; }
API cudaError_t cudaProfilerStop() { return cudaSuccess; }

static int missing_in_driver(...) { return simulated_missing("a function of the driver"); }

API cudaError_t cudaGetDriverEntryPointByVersion(const char* name, void** function, unsigned,
                                                 unsigned long long,
                                                 cudaDriverEntryPointQueryResult* result) {
  static void* driver = dlopen("libcuda.so.1", RTLD_NOW | RTLD_GLOBAL);
  *function = driver ? dlsym(driver, name) : nullptr;
  // torch asks for functions that it hardly ever calls, and is not content with none.
  if (!*function) *function = (void*)missing_in_driver;
  if (result) *result = cudaDriverEntryPointSuccess;
  return cudaSuccess;
}
