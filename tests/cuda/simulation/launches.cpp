// Kernels: their registration by the code that nvcc makes, their launches, and what is checked then.

#include <cstring>
#include <shared_mutex>

#include "launches.h"
#include "runtime.h"

namespace simulated {

struct Registered {
  std::shared_mutex mutex;
  std::unordered_map<const void*, Kernel*> kernels;  // by the address of the host's function
  std::unordered_map<const void*, std::vector<char>> variables;
};

static Registered& registered() {
  static auto* made = new Registered;
  return *made;
}

void each_kernel(const std::function<void(Kernel&)>& visit) {
  std::shared_lock guard(registered().mutex);
  for (auto& [_, kernel] : registered().kernels) visit(*kernel);
}

static Kernel& kernel_of(const void* function) {
  std::shared_lock guard(registered().mutex);
  auto found = registered().kernels.find(function);
  require(found != registered().kernels.end(), cudaErrorInvalidDeviceFunction);
  return *found->second;
}

// -- pointers ----------------------------------------------------------------------------------

/// Calls with each parameter of a demangled function.
static void each_parameter(const std::string& name, const std::function<void(std::string)>& visit) {
  auto end = name.rfind(')');
  if (end == std::string::npos) return;
  auto begin = end;
  for (int depth = 1; begin > 0 && depth > 0;) {
    --begin;
    depth += name[begin] == ')' ? 1 : name[begin] == '(' ? -1 : 0;
  }
  std::string parameter;
  int depth = 0;
  for (auto at = begin + 1; at < end; ++at) {
    char c = name[at];
    depth += strchr("<([{", c) ? 1 : strchr(">)]}", c) ? -1 : 0;
    if (c != ',' || depth) {
      parameter += c;
      continue;
    }
    visit(parameter.substr(parameter.find_first_not_of(' ')));
    parameter.clear();
  }
  if (auto at = parameter.find_first_not_of(' '); at != std::string::npos)
    visit(parameter.substr(at));
}

/// For each parameter, the number of pointers that it begins with: those of an array, as of the
/// elementwise kernels, or of a tensor accessor. -1 is one that may point to the host as well.
static std::vector<int> pointers_of(const Kernel& kernel) {
  std::vector<int> found;
  each_parameter(demangled(kernel.name), [&](const std::string& parameter) {
    static const std::string array = "std::array<char*, ";
    if (parameter.rfind(array, 0) == 0)
      found.push_back(std::atoi(parameter.c_str() + array.size()));
    else if (parameter.back() == '*' || parameter.find("TensorAccessor<") != std::string::npos)
      found.push_back(-1);
    else
      found.push_back(0);
  });
  return found;
}

/// Reports pointers to memory of another device, or of the host, where a GPU would need access to
/// its peer, or fault.
static void check_pointers(Kernel& kernel, void** arguments) {
  std::call_once(kernel.knows_pointers, [&] { kernel.pointers = pointers_of(kernel); });
  for (size_t i = 0; i < kernel.pointers.size(); ++i) {
    int number = kernel.pointers[i];
    for (int j = 0; j < std::abs(number); ++j) {
      void* pointer = ((void**)arguments[i])[j];
      auto place = pointer ? place_of(pointer) : Place{DEVICE, current_device};
      const char* where = nullptr;
      if (place.kind == DEVICE && place.device != current_device) where = "another device";
      if (number > 0 && place.kind == PAGEABLE) where = "the host";
      if (!where) continue;
      auto what = "memory of " + std::string(where) + " in " + demangled(kernel.name).substr(0, 150);
      count("pointers/" + what);
      print_python_stack(what);
    }
  }
}

// -- launches ----------------------------------------------------------------------------------

static void launch(Kernel& kernel, dim3 grid, dim3 block, size_t shared, cudaStream_t handle,
                   void** arguments) {
  bool is_possible = grid.x && grid.y && grid.z && block.x && block.y && block.z;
  is_possible = is_possible && grid.x <= 0x7fffffffu && grid.y <= 65535 && grid.z <= 65535;
  is_possible = is_possible && block.x <= 1024 && block.y <= 1024 && block.z <= 64;
  is_possible = is_possible && (size_t)block.x * block.y * block.z <= 1024;
  require(is_possible, cudaErrorInvalidConfiguration);
  require(shared <= (size_t)kernel.most_dynamic_memory, cudaErrorInvalidValue);
  auto* stream = stream_of(handle);
  require(stream->device == current_device, cudaErrorInvalidResourceHandle);
  use_device();
  if (is_tracing())  // demangling takes as long as a launch
    simulated_trace("kernel %s <<<(%u, %u, %u), (%u, %u, %u), %zu>>> on device %d",
                    demangled(kernel.name).c_str(), grid.x, grid.y, grid.z, block.x, block.y,
                    block.z, shared, current_device);
  if (arguments) check_pointers(kernel, arguments);
  Run run;
  static const bool computes = simulated_setting("SIMULATED_NUMBERS", 1) != 0;
  if (!computes && arguments && kernel.name.find("NonZeroOp") != std::string::npos &&
      kernel.name.find("DeviceReduceSingleTileKernel") != std::string::npos) {
    // The host reads how many elements are not zero, and allocates for them: let all be.
    int *result = *(int**)arguments[1], number = *(int*)arguments[2];
    run = [=] { *result = number; };
  }
  bool is_captured = stream->capture != nullptr;
  enqueue(stream, "kernel", kernel.name, kernel_time, run);
  ++(is_captured ? kernel.captured : kernel.launches);
  ++stream->launches;
  if (is_logging()) note("kernel " + demangled(kernel.name));
}

struct Configuration {
  dim3 grid, block;
  size_t shared;
  cudaStream_t stream;
};

static std::vector<Configuration>& configurations() {
  static thread_local auto* made = new std::vector<Configuration>;
  return *made;
}

}  // namespace simulated

using namespace simulated;

API void** __cudaRegisterFatBinary(void*) { return (void**)malloc(64); }
API void __cudaRegisterFatBinaryEnd(void**) {}
API void __cudaUnregisterFatBinary(void**) {}
API char __cudaInitModule(void**) { return 1; }

API void __cudaRegisterFunction(void**, const char* function, char*, const char* name, int, uint3*,
                                uint3*, dim3*, dim3*, int*) {
  std::unique_lock guard(registered().mutex);
  auto*& kernel = registered().kernels[function];
  if (!kernel) kernel = new Kernel;
  kernel->name = name;
}

API void __cudaRegisterVar(void**, char* variable, char*, const char*, int, size_t size, int, int) {
  std::unique_lock guard(registered().mutex);
  registered().variables[variable].resize(size);
}

API cudaError_t cudaGetSymbolAddress(void** address, const void* symbol) try {
  std::shared_lock guard(registered().mutex);
  auto found = registered().variables.find(symbol);
  require(found != registered().variables.end(), cudaErrorInvalidSymbol);
  *address = found->second.data();
  return cudaSuccess;
} OR_ERROR

API cudaError_t cudaMemcpyToSymbol(const void* symbol, const void* from, size_t size,
                                   size_t offset, cudaMemcpyKind) try {
  ENTER();
  void* address;
  require(cudaGetSymbolAddress(&address, symbol) == cudaSuccess, cudaErrorInvalidSymbol);
  memcpy((char*)address + offset, from, size);
  count("copies/to a symbol");
  return cudaSuccess;
} OR_ERROR

API unsigned __cudaPushCallConfiguration(dim3 grid, dim3 block, size_t shared, cudaStream_t stream) {
  configurations().push_back({grid, block, shared, stream});
  return 0;
}

API cudaError_t __cudaPopCallConfiguration(dim3* grid, dim3* block, size_t* shared,
                                           void* stream) try {
  require(!configurations().empty(), cudaErrorMissingConfiguration);
  auto& last = configurations().back();
  *grid = last.grid, *block = last.block, *shared = last.shared;
  *(cudaStream_t*)stream = last.stream;
  configurations().pop_back();
  return cudaSuccess;
} OR_ERROR

API cudaError_t cudaLaunchKernel(const void* function, dim3 grid, dim3 block, void** arguments,
                                 size_t shared, cudaStream_t stream) try {
  ENTER();
  launch(kernel_of(function), grid, block, shared, stream, arguments);
  return cudaSuccess;
} OR_ERROR

API cudaError_t cudaLaunchCooperativeKernel(const void* function, dim3 grid, dim3 block,
                                            void** arguments, size_t shared,
                                            cudaStream_t stream) try {
  ENTER();
  launch(kernel_of(function), grid, block, shared, stream, arguments);
  return cudaSuccess;
} OR_ERROR

API cudaError_t cudaLaunchKernelExC(const cudaLaunchConfig_t* given, const void* function,
                                    void** arguments) try {
  ENTER();
  launch(kernel_of(function), given->gridDim, given->blockDim, given->dynamicSmemBytes,
         given->stream, arguments);
  return cudaSuccess;
} OR_ERROR

// A cudaKernel_t is a Kernel here.
API cudaError_t __cudaGetKernel(cudaKernel_t* kernel, const void* function) try {
  *kernel = (cudaKernel_t)&kernel_of(function);
  return cudaSuccess;
} OR_ERROR

API cudaError_t __cudaLaunchKernel(cudaKernel_t kernel, dim3 grid, dim3 block, void** arguments,
                                   size_t shared, cudaStream_t stream) try {
  ENTER();
  launch(*(Kernel*)kernel, grid, block, shared, stream, arguments);
  return cudaSuccess;
} OR_ERROR

API int simulated_launch(void* handle, const char* name) try {
  auto* stream = stream_of((cudaStream_t)handle);
  count((stream->capture ? "captured launches/" : "launches/") + std::string(name));
  note(std::string("kernel ") + name);
  enqueue(stream, "kernel", name, kernel_time, nullptr);
  return cudaSuccess;
} OR_ERROR

API cudaError_t cudaFuncGetAttributes(cudaFuncAttributes* attributes, const void* function) try {
  ENTER();
  auto& kernel = kernel_of(function);
  *attributes = {};
  attributes->maxThreadsPerBlock = 1024;
  attributes->numRegs = 32;
  attributes->ptxVersion = attributes->binaryVersion = 90;
  attributes->maxDynamicSharedSizeBytes = kernel.most_dynamic_memory;
  attributes->preferredShmemCarveout = -1;
  return cudaSuccess;
} OR_ERROR

API cudaError_t cudaFuncSetAttribute(const void* function, cudaFuncAttribute attribute,
                                     int value) try {
  ENTER();
  auto& kernel = kernel_of(function);
  if (attribute == cudaFuncAttributeMaxDynamicSharedMemorySize) {
    require(value <= 227 * 1024, cudaErrorInvalidValue);
    kernel.most_dynamic_memory = std::max(value, 48 * 1024);
  }
  return cudaSuccess;
} OR_ERROR

API cudaError_t cudaOccupancyMaxActiveBlocksPerMultiprocessorWithFlags(
    int* blocks, const void* function, int threads, size_t shared, unsigned) try {
  ENTER();
  kernel_of(function);
  *blocks = threads > 0 && threads <= 1024 ? std::min(2048 / threads, 32) : 0;
  if (shared) *blocks = std::min<size_t>(*blocks, 227 * 1024 / shared);
  return cudaSuccess;
} OR_ERROR

API cudaError_t cudaOccupancyMaxActiveBlocksPerMultiprocessor(int* blocks, const void* function,
                                                              int threads, size_t shared) {
  return cudaOccupancyMaxActiveBlocksPerMultiprocessorWithFlags(blocks, function, threads, shared, 0);
}
