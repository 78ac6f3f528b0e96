// Memory: of devices, which is a part of the address space each, pinned memory of the host, copies.

#include <string.h>
#include <sys/mman.h>

#include <shared_mutex>

#include "runtime.h"

namespace simulated {

static const size_t PAGE = 4096;
static const size_t DEVICE_MEMORY = 80ull << 30;
static const size_t ARENA = 2 * DEVICE_MEMORY;  // more, as it becomes fragmented

/// The addresses of a device. Its pages are there once they are written.
struct Arena {
  char* base;
  size_t in_use = 0;
  std::map<size_t, size_t> free{{0, ARENA}}, used;  // offset -> size

  Arena() {
    void* at = mmap(nullptr, ARENA, PROT_READ | PROT_WRITE,
                    MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
    require(at != MAP_FAILED, cudaErrorMemoryAllocation);
    base = (char*)at;
  }

  void* allocate(size_t size) {
    size = std::max<size_t>((size + 511) & ~511ull, 512);
    if (in_use + size > DEVICE_MEMORY) return nullptr;
    for (auto [at, available] : free) {
      if (available < size) continue;
      free.erase(at);
      if (available > size) free[at + size] = available - size;
      used[at] = size;
      in_use += size;
      return base + at;
    }
    return nullptr;
  }

  bool release(void* memory) {
    auto found = used.find((char*)memory - base);
    if (found == used.end()) return false;
    auto [at, size] = *found;
    used.erase(found);
    in_use -= size;
    clear(at, size);
    auto next = free.lower_bound(at);
    if (next != free.end() && at + size == next->first) size += next->second, next = free.erase(next);
    if (next != free.begin()) {
      auto before = std::prev(next);
      if (before->first + before->second == at) {
        before->second += size;
        return true;
      }
    }
    free[at] = size;
    return true;
  }

 private:
  /// Gives whole pages back, which are zero when they are used again, as what remains.
  void clear(size_t at, size_t size) {
    size_t first = (at + PAGE - 1) & ~(PAGE - 1), last = (at + size) & ~(PAGE - 1);
    if (first >= last) {
      memset(base + at, 0, size);
      return;
    }
    madvise(base + first, last - first, MADV_DONTNEED);
    memset(base + at, 0, first - at);
    memset(base + last, 0, at + size - last);
  }
};

static std::atomic<Arena*> arenas[MOST_DEVICES];

static Arena& arena(int device) {
  Guard guard(mutex());
  if (!arenas[device]) arenas[device] = new Arena;
  return *arenas[device];
}

/// Pinned memory, by its address.
struct Pinned {
  std::shared_mutex mutex;
  struct Region {
    size_t size;
    int device;
    bool is_allocated;  // here, and not registered
  };
  std::map<char*, Region> regions;
};

static Pinned& pinned() {
  static auto* made = new Pinned;
  return *made;
}

Place place_of(const void* memory) {
  auto* at = (char*)memory;
  for (int device = 0; device < device_count(); ++device) {
    auto* arena = arenas[device].load(std::memory_order_acquire);
    if (arena && at >= arena->base && at < arena->base + ARENA) return {DEVICE, device};
  }
  std::shared_lock guard(pinned().mutex);
  auto next = pinned().regions.upper_bound(at);
  if (next == pinned().regions.begin()) return {};
  auto& [begin, region] = *std::prev(next);
  return at < begin + region.size ? Place{PINNED, region.device} : Place{};
}

// -- copies ------------------------------------------------------------------------------------

static bool fits(cudaMemcpyKind kind, const Place& to, const Place& from) {
  bool to_device = to.kind == DEVICE, from_device = from.kind == DEVICE;
  switch (kind) {
    case cudaMemcpyHostToHost: return !to_device && !from_device;
    case cudaMemcpyHostToDevice: return to_device && !from_device;
    case cudaMemcpyDeviceToHost: return !to_device && from_device;
    case cudaMemcpyDeviceToDevice: return to.kind != PAGEABLE && from.kind != PAGEABLE;
    default: return true;
  }
}

static std::string name_of(const Place& to, const Place& from, bool is_async) {
  auto how = is_async ? ", async" : ", sync";
  if (to.kind == DEVICE && from.kind == DEVICE)
    return std::string(to.device == from.device ? "on one device" : "between devices") + how;
  auto side = [](const Place& place) { return place.kind == DEVICE ? "device" : "host"; };
  bool is_pinned = to.kind == PINNED || from.kind == PINNED;
  return std::string(side(from)) + " to " + side(to) + (is_pinned ? ", pinned" : ", pageable") + how;
}

/// Copies rows of some width, which are so many bytes apart.
struct Rows {
  char* to;
  const char* from;
  size_t width, height = 1, to_pitch = 0, from_pitch = 0;

  void operator()() const {
    for (size_t i = 0; i < height && width; ++i)
      memmove(to + i * to_pitch, from + i * from_pitch, width);
  }
};

static void copy(Rows rows, cudaMemcpyKind kind, cudaStream_t handle, bool is_async) {
  auto* stream = stream_of(handle);
  auto to = place_of(rows.to), from = place_of(rows.from);
  size_t size = rows.width * rows.height;
  require(!size || fits(kind, to, from), cudaErrorInvalidValue);
  use_device();
  auto name = name_of(to, from, is_async);
  bool is_captured = stream->capture != nullptr;
  if (is_captured && (from.kind == PAGEABLE || to.kind == PAGEABLE)) {
    stream->capture->invalidate();
    throw cudaErrorStreamCaptureUnsupported;
  }
  count("copies/" + name + (is_captured ? ", captured" : ""));
  count("bytes/" + name, size);
  note("copy " + name + ", " + std::to_string(size) + " bytes");
  simulated_trace("copy %s, %zu bytes", name.c_str(), size);
  Run run = rows;
  if (simulated_is_lazy() && from.kind == PAGEABLE && !is_captured) {
    // The host may change it as soon as this call returns.
    auto held = std::make_shared<std::vector<char>>();
    for (size_t i = 0; i < rows.height; ++i) {
      auto* row = rows.from + i * rows.from_pitch;
      held->insert(held->end(), row, row + rows.width);
    }
    run = [rows, held]() mutable {
      rows.from = held->data(), rows.from_pitch = rows.width;
      rows();
    };
  }
  enqueue(stream, "copy", name, copy_time, std::move(run));
  if (is_captured) return;
  bool is_inside = to.kind == DEVICE && from.kind == DEVICE;
  if (!is_async && !is_inside) host_waits("cudaMemcpy", stream->ready);
  if (is_async && from.kind == DEVICE && to.kind == PAGEABLE)
    host_waits("cudaMemcpyAsync to pageable memory", stream->ready);
  if (!is_async || to.kind == PAGEABLE) drain(stream);
}

static void set(void* memory, int value, size_t size, cudaStream_t handle) {
  auto* stream = stream_of(handle);
  require(!size || place_of(memory).kind != PAGEABLE, cudaErrorInvalidValue);
  use_device();
  count(stream->capture ? "memsets/captured" : "memsets/memset");
  note("memset, " + std::to_string(size) + " bytes");
  enqueue(stream, "memset", "memset", kernel_time, [=] {
    if (size) memset(memory, value, size);
  });
}

}  // namespace simulated

using namespace simulated;

API cudaError_t cudaMalloc(void** memory, size_t size) try {
  ENTER();
  unsafe_in_captures();
  use_device();
  Guard guard(mutex());
  *memory = size ? arena(current_device).allocate(size) : nullptr;
  require(*memory || !size, cudaErrorMemoryAllocation);
  return cudaSuccess;
} OR_ERROR

API cudaError_t cudaFree(void* memory) try {
  ENTER();
  unsafe_in_captures();
  drain_all();  // as it waits for whoever may use the memory
  if (!memory) return cudaSuccess;
  auto place = place_of(memory);
  require(place.kind == DEVICE, cudaErrorInvalidValue);
  Guard guard(mutex());
  require(arena(place.device).release(memory), cudaErrorInvalidValue);
  return cudaSuccess;
} OR_ERROR

API cudaError_t cudaMemGetInfo(size_t* available, size_t* total) try {
  ENTER();
  use_device();
  Guard guard(mutex());
  *total = DEVICE_MEMORY;
  *available = DEVICE_MEMORY - arena(current_device).in_use;
  return cudaSuccess;
} OR_ERROR

API cudaError_t cudaHostAlloc(void** memory, size_t size, unsigned) try {
  ENTER();
  unsafe_in_captures();
  use_device();
  size = std::max((size + PAGE - 1) & ~(PAGE - 1), PAGE);
  void* at = mmap(nullptr, size, PROT_READ | PROT_WRITE,
                  MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
  require(at != MAP_FAILED, cudaErrorMemoryAllocation);
  std::unique_lock guard(pinned().mutex);
  pinned().regions[(char*)at] = {size, current_device, true};
  *memory = at;
  return cudaSuccess;
} OR_ERROR

API cudaError_t cudaFreeHost(void* memory) try {
  ENTER();
  unsafe_in_captures();
  drain_all();
  if (!memory) return cudaSuccess;
  std::unique_lock guard(pinned().mutex);
  auto found = pinned().regions.find((char*)memory);
  bool is_ours = found != pinned().regions.end() && found->second.is_allocated;
  require(is_ours, cudaErrorInvalidValue);
  munmap(memory, found->second.size);
  pinned().regions.erase(found);
  return cudaSuccess;
} OR_ERROR

API cudaError_t cudaHostRegister(void* memory, size_t size, unsigned) try {
  ENTER();
  unsafe_in_captures();
  std::unique_lock guard(pinned().mutex);
  pinned().regions[(char*)memory] = {size, current_device, false};
  return cudaSuccess;
} OR_ERROR

API cudaError_t cudaHostUnregister(void* memory) try {
  ENTER();
  std::unique_lock guard(pinned().mutex);
  require(pinned().regions.erase((char*)memory), cudaErrorInvalidValue);
  return cudaSuccess;
} OR_ERROR

API cudaError_t cudaPointerGetAttributes(cudaPointerAttributes* attributes, const void* memory) try {
  ENTER();
  auto place = place_of(memory);
  *attributes = {};
  attributes->type = place.kind == DEVICE   ? cudaMemoryTypeDevice
                     : place.kind == PINNED ? cudaMemoryTypeHost
                                            : cudaMemoryTypeUnregistered;
  attributes->device = place.device;
  attributes->devicePointer = place.kind == PAGEABLE ? nullptr : (void*)memory;
  attributes->hostPointer = place.kind == DEVICE ? nullptr : (void*)memory;
  return cudaSuccess;
} OR_ERROR

API cudaError_t cudaMemcpyAsync(void* to, const void* from, size_t size, cudaMemcpyKind kind,
                                cudaStream_t stream) try {
  ENTER();
  copy({(char*)to, (const char*)from, size}, kind, stream, true);
  return cudaSuccess;
} OR_ERROR

API cudaError_t cudaMemcpy(void* to, const void* from, size_t size, cudaMemcpyKind kind) try {
  ENTER();
  unsafe_in_captures();
  copy({(char*)to, (const char*)from, size}, kind, nullptr, false);
  return cudaSuccess;
} OR_ERROR

API cudaError_t cudaMemcpyPeerAsync(void* to, int, const void* from, int, size_t size,
                                    cudaStream_t stream) try {
  ENTER();
  copy({(char*)to, (const char*)from, size}, cudaMemcpyDefault, stream, true);
  return cudaSuccess;
} OR_ERROR

API cudaError_t cudaMemcpy2DAsync(void* to, size_t to_pitch, const void* from, size_t from_pitch,
                                  size_t width, size_t height, cudaMemcpyKind kind,
                                  cudaStream_t stream) try {
  ENTER();
  Rows rows{(char*)to, (const char*)from, width, height, to_pitch, from_pitch};
  copy(rows, kind, stream, true);
  return cudaSuccess;
} OR_ERROR

API cudaError_t cudaMemsetAsync(void* memory, int value, size_t size, cudaStream_t stream) try {
  ENTER();
  set(memory, value, size, stream);
  return cudaSuccess;
} OR_ERROR

API cudaError_t cudaMemset(void* memory, int value, size_t size) try {
  ENTER();
  unsafe_in_captures();
  set(memory, value, size, nullptr);
  return cudaSuccess;
} OR_ERROR
