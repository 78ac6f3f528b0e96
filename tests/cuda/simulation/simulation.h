// What the simulated libraries share. The runtime has it all: the other libraries are linked to it.

#pragma once

#ifdef __cplusplus
#include <cstdlib>

/// A number that the environment sets.
inline double simulated_setting(const char* name, double otherwise) {
  const char* value = std::getenv(name);
  return value && *value ? std::atof(value) : otherwise;
}

extern "C" {
#endif

/// Adds to a counter, whose name is "section/entry".
void simulated_count(const char* name, long long by);

/// Prints a line if SIMULATED_TRACE is set.
void simulated_trace(const char* format, ...);

/// Prints a line.
void simulated_print(const char* format, ...);

/// Whether streams do their work only when somebody waits for it (SIMULATED_LAZY).
int simulated_is_lazy();

int simulated_device();
int simulated_device_count();
int simulated_has_context(int device);

/// Gives a stream work, which it does in its order: at once, when somebody waits for it, or at each
/// launch of the graph that the stream is captured into. The null stream is the device's. `drop` is
/// called when nothing needs the argument any more. Returns a cudaError_t.
int simulated_stream_op(int device, void* stream, const char* kind, const char* name,
                        void (*run)(void*), void* argument, void (*drop)(void*));

/// Lets a stream wait for all that another one has been given (matters with lazy streams only).
void simulated_join(int to_device, void* to, int from_device, void* from);

/// Counts a kernel that the runtime does not know: of a library, or of a module of the driver.
int simulated_launch(void* stream, const char* name);

/// Counts and reports a call of a function that the simulation lacks. Returns cudaErrorNotSupported.
int simulated_missing(const char* name);

#ifdef __cplusplus
}  // extern "C"
#endif
