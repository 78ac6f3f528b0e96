// What the fake libraries share. Counters live in the fake libcudart.
#pragma once
#include <atomic>
#include <cstddef>

extern "C" {
// A counter with a name. Made once per call site, and never freed.
struct simulated_counter {
  const char* name;
  std::atomic<long long> n;
  simulated_counter* next;
};
void simulated_register(simulated_counter*);
// Counts by a name that is made at run time (slower).
void simulated_count(const char* name, long long by);
// Runs `fn(arg)` in order of a stream: now, or at each replay of the graph that the stream is
// captured into. Returns a cudaError_t. The device is that of a null stream. An empty name marks the end of an operation. `drop(arg)` frees the argument when nothing refers to it.
int simulated_stream_op(int device, void* stream, const char* name, void (*fn)(void*), void* arg, void (*drop)(void*), double us);
// Counts a kernel that was launched by other means than the runtime (the driver API).
int simulated_driver_launch(void* stream, const char* name);
int simulated_is_lazy();
void simulated_join(int to_device, void* to, int from_device, void* from);
int simulated_trace();
void simulated_tracef(const char* format, ...);
int simulated_device();
int simulated_device_count();
}

#define SIMULATED_COUNT(lit)                                                    \
  do {                                                                     \
    static simulated_counter c_{lit, {0}, nullptr};                             \
    static bool r_ = (simulated_register(&c_), true);                           \
    (void)r_;                                                              \
    c_.n.fetch_add(1, std::memory_order_relaxed);                          \
  } while (0)
