// What torch asks of the CUDA driver itself: contexts, and modules that were compiled at run time.

#include <cuda_runtime_api.h>

#include <cstdint>
#include <string>

#include "simulation.h"

#define API extern "C" __attribute__((visibility("default")))

using Result = int;

static void* context_of(int device) { return (void*)(std::uintptr_t)(0x1000 + device); }

static int device_of(void* context) { return (int)((std::uintptr_t)context - 0x1000); }

API Result cuGetErrorString(Result error, const char** text) {
  *text = cudaGetErrorString((cudaError_t)error);
  return 0;
}

API Result cuDeviceGet(int* device, int index) {
  *device = index;
  return 0 <= index && index < simulated_device_count() ? 0 : cudaErrorInvalidDevice;
}

API Result cuDeviceGetAttribute(int* value, int attribute, int device) {
  return cudaDeviceGetAttribute(value, (cudaDeviceAttr)attribute, device);
}

API Result cuDevicePrimaryCtxGetState(int device, unsigned* flags, int* is_active) {
  *flags = 0;
  *is_active = simulated_has_context(device);
  return 0;
}

API Result cuDevicePrimaryCtxRetain(void** context, int device) {
  *context = context_of(device);
  return 0;
}

API Result cuCtxGetCurrent(void** context) {
  int device = simulated_device();
  *context = simulated_has_context(device) ? context_of(device) : nullptr;
  return 0;
}

API Result cuCtxSetCurrent(void* context) {
  return context ? (Result)cudaSetDevice(device_of(context)) : 0;
}

API Result cuPointerGetAttribute(void* value, int attribute, unsigned long long pointer) {
  cudaPointerAttributes found;
  cudaPointerGetAttributes(&found, (void*)pointer);
  if (found.type == cudaMemoryTypeUnregistered) return cudaErrorInvalidValue;
  constexpr int CONTEXT = 1, DEVICE_ORDINAL = 9;
  if (attribute == CONTEXT)
    *(void**)value = context_of(found.device);
  else if (attribute == DEVICE_ORDINAL)
    *(int*)value = found.device;
  else
    return cudaErrorNotSupported;
  return 0;
}

// torch asks for the driver's log.
API Result cuLogsRegisterCallback(void*, void*, void** handle) {
  if (handle) *handle = nullptr;
  return 0;
}

API Result cuLogsUnregisterCallback(void*) { return 0; }

// A function of a module is its name.
API Result cuModuleLoadData(void** module, const void*) {
  static char only;
  *module = &only;
  return 0;
}

API Result cuModuleGetFunction(void** function, void*, const char* name) {
  *function = new std::string(name);
  return 0;
}

API Result cuLaunchKernel(void* function, unsigned grid_x, unsigned grid_y, unsigned grid_z,
                          unsigned block_x, unsigned block_y, unsigned block_z, unsigned,
                          void* stream, void**, void**) {
  if (!grid_x || !grid_y || !grid_z || !block_x || !block_y || !block_z)
    return cudaErrorInvalidValue;
  return simulated_launch(stream, ((std::string*)function)->c_str());
}

API Result cuOccupancyMaxActiveBlocksPerMultiprocessor(int* blocks, void*, int threads, size_t) {
  *blocks = threads > 0 ? 2048 / threads : 0;
  return 0;
}
