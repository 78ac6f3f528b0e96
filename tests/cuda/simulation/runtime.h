// What the parts of the simulated CUDA runtime share.
//
// Memory of the host stands for that of the devices. Copies are real, kernels do nothing (values.cpp
// computes what they would). Everything that a stream is given is done at once, in the thread that
// gives it, unless streams are lazy. Beside that, streams have a clock: with simulated_set_times,
// kernels and copies take time, and who waits for them sleeps. A launch takes the host's time.

#pragma once

#include <cuda_runtime_api.h>
#include <pthread.h>

#include <atomic>
#include <deque>
#include <functional>
#include <map>
#include <memory>
#include <mutex>
#include <string>
#include <unordered_map>
#include <unordered_set>
#include <vector>

#include "simulation.h"

#define API extern "C" __attribute__((visibility("default")))

namespace simulated {

using Error = cudaError_t;
using Run = std::function<void()>;

constexpr int MOST_DEVICES = 64;

/// Guards streams, events, captures and memory. Nothing that is kept here is ever destroyed, because
/// threads of torch use it until the process ends.
std::recursive_mutex& mutex();
using Guard = std::lock_guard<std::recursive_mutex>;

// -- entering and leaving a call of the API ----------------------------------------------------

/// Counts a call, and throws in a process that was forked from one that uses CUDA.
void entered(const char* function, std::atomic<long long>*& counter);

/// Remembers an error for cudaGetLastError, counts and returns it.
Error failed(const char* function, Error error);

#define ENTER()                                               \
  do {                                                        \
    static std::atomic<long long>* counter_ = nullptr;        \
    ::simulated::entered(__func__, counter_);                 \
  } while (0)

/// The end of a function that is a try block: `Error f() try {...} OR_ERROR`.
#define OR_ERROR \
  catch (cudaError_t error) { return ::simulated::failed(__func__, error); }

inline void require(bool holds, Error otherwise) {
  if (!holds) throw otherwise;
}

// -- counters and the log ----------------------------------------------------------------------

std::atomic<long long>* counter(const std::string& name);
void count(const std::string& name, long long by = 1);

/// Adds to the log, if there is one.
void note(const std::string& what);
bool is_tracing(), is_logging();
std::string demangled(const std::string& name);

// -- time --------------------------------------------------------------------------------------

double now();       // microseconds
double computed();  // by this thread, in microseconds
extern double kernel_time, copy_time, launch_time;

/// Counts a wait of the host, and sleeps until a time of the clock of streams.
void host_waits(const char* function, double until);
void print_python_stack(const std::string& why);

// -- devices -----------------------------------------------------------------------------------

int device_count();
extern thread_local int current_device;

/// The current device is in use from now on, and has a context.
void use_device();

// -- memory ------------------------------------------------------------------------------------

enum Kind { PAGEABLE, PINNED, DEVICE };
struct Place {
  Kind kind = PAGEABLE;
  int device = -1;
};
Place place_of(const void* memory);

// -- streams and events ------------------------------------------------------------------------

struct Stream;

/// What a lazy stream has been given: work, or the wait for another stream up to some point.
struct Item {
  Run run;
  Stream* other = nullptr;
  long long upto = 0;
};

/// For each stream, the number of its operations that come before.
using Clock = std::map<Stream*, long>;

struct Node {
  std::string kind, name;
  Run run;
  double duration = 0;
};

struct Graph {
  std::vector<Node> nodes;
};

struct Capture {
  unsigned long long id;
  cudaStreamCaptureMode mode;
  Stream* origin;
  pthread_t owner = pthread_self();
  cudaStreamCaptureStatus status = cudaStreamCaptureStatusActive;
  std::unique_ptr<Graph> graph = std::make_unique<Graph>();
  std::map<Stream*, Clock> clocks;  // what comes before the next operation of each stream
  Clock operations;

  void invalidate() { status = cudaStreamCaptureStatusInvalidated; }
};

/// A stream is never freed: work and events may refer to it.
struct Stream {
  int device = 0;
  unsigned flags = 0;
  int priority = 0;
  unsigned long long id = 0;
  double ready = 0;  // when the simulated work ends
  std::shared_ptr<Capture> capture;
  std::atomic<long long> launches{0};
  std::deque<Item> items;
  long long given = 0, done = 0;
};

struct Event {
  int device = 0;
  unsigned flags = 0;
  bool is_recorded = false;
  double time = 0;
  std::shared_ptr<Capture> capture;
  Clock clock;  // in the capture
  Stream* stream = nullptr;
  long long upto = 0;
};

/// Throws cudaErrorInvalidResourceHandle for what is no stream.
Stream* stream_of(cudaStream_t handle);
Stream* default_stream(int device);
std::vector<Stream*> streams_of(int device);
unsigned long long next_id();

/// Gives a stream work.
void enqueue(Stream* stream, const char* kind, const std::string& name, double duration, Run run);

/// Does what lazy streams have been given: one of them, one device's, or all of them.
void drain(Stream* stream, long long upto);
void drain(Stream* stream);
void drain_device(int device);
void drain_all();

// -- captures ----------------------------------------------------------------------------------

/// Throws if this thread may not make a call that is unsafe while something is captured.
void unsafe_in_captures();

/// Throws if work outside of a capture would make the legacy stream wait for the capture.
void check_captures(const Stream& stream);

/// Throws if a stream or an event is being captured, because somebody asks how far it is.
void not_in_capture(const std::shared_ptr<Capture>& capture, Error error);

/// Adds work to the graph that a stream is captured into.
void add_node(Stream* stream, Node node);

}  // namespace simulated
