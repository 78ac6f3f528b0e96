// Streams and events.
//
// With SIMULATED_LAZY=1, work waits in its stream until somebody waits for it: the host, or another
// stream that does its own. So whoever forgets to wait reads memory that was not written yet, and
// memory that was freed without `record_stream` is overwritten before it is read.

#include "runtime.h"

namespace simulated {

static const bool is_lazy = simulated_setting("SIMULATED_LAZY", 0) != 0;

/// How long an event that somebody polls is not ready, in microseconds. Pollers wait for the end.
static const double POLLS = 20'000;

struct Handles {
  std::unordered_set<void*> streams, events;
  Stream* defaults[MOST_DEVICES] = {};
};

static Handles& handles() {
  static auto* made = new Handles;
  return *made;
}

unsigned long long next_id() {
  static std::atomic<unsigned long long> last{0};
  return ++last;
}

static Stream* new_stream(int device, unsigned flags, int priority) {
  auto* made = new Stream;
  made->device = device, made->flags = flags, made->priority = priority, made->id = next_id();
  return made;
}

Stream* default_stream(int device) {
  Guard guard(mutex());
  auto*& stream = handles().defaults[device];
  if (!stream) stream = new_stream(device, 0, 0);
  return stream;
}

Stream* stream_of(cudaStream_t handle) {
  if (!handle || handle == cudaStreamLegacy || handle == cudaStreamPerThread)
    return default_stream(current_device);
  Guard guard(mutex());
  require(handles().streams.count(handle), cudaErrorInvalidResourceHandle);
  return (Stream*)handle;
}

std::vector<Stream*> streams_of(int device) {
  Guard guard(mutex());
  std::vector<Stream*> found{default_stream(device)};
  for (void* handle : handles().streams)
    if (((Stream*)handle)->device == device) found.push_back((Stream*)handle);
  return found;
}

static Event* event_of(cudaEvent_t handle) {
  Guard guard(mutex());
  require(handles().events.count(handle), cudaErrorInvalidResourceHandle);
  return (Event*)handle;
}

// -- work --------------------------------------------------------------------------------------

/// One thread at a time does the work of lazy streams.
static std::recursive_mutex& working() {
  static auto* made = new std::recursive_mutex;
  return *made;
}

void drain(Stream* stream, long long upto) {
  if (!is_lazy || !stream) return;
  std::lock_guard one(working());
  for (;;) {
    Item item;
    {
      Guard guard(mutex());
      if (stream->done >= upto || stream->items.empty()) return;
      item = std::move(stream->items.front());
      stream->items.pop_front();
    }
    if (item.other) drain(item.other, item.upto);
    if (item.run) item.run();
    Guard guard(mutex());
    ++stream->done;
  }
}

void drain(Stream* stream) {
  if (!is_lazy) return;
  long long all;
  {
    Guard guard(mutex());
    all = stream->given;
  }
  drain(stream, all);
}

void drain_device(int device) {
  if (!is_lazy) return;
  for (auto* stream : streams_of(device)) drain(stream);
}

void drain_all() {
  for (int device = 0; is_lazy && device < device_count(); ++device) drain_device(device);
}

static void give(Stream* stream, Item item) {
  Guard guard(mutex());
  stream->items.push_back(std::move(item));
  ++stream->given;
}

void enqueue(Stream* stream, const char* kind, const std::string& name, double duration, Run run) {
  if (launch_time > 0 && !name.empty())  // the second half of something has none
    for (double end = computed() + launch_time; computed() < end;) {
    }
  {
    Guard guard(mutex());
    if (stream->capture) return add_node(stream, {kind, name, std::move(run), duration});
    check_captures(*stream);
    if (duration > 0) stream->ready = std::max(now(), stream->ready) + duration;
    if (is_lazy && run) return give(stream, {std::move(run)});
  }
  if (run) run();
}

}  // namespace simulated

using namespace simulated;

API int simulated_is_lazy() { return is_lazy; }

API int simulated_stream_op(int device, void* handle, const char* kind, const char* name,
                            void (*run)(void*), void* argument, void (*drop)(void*)) try {
  std::shared_ptr<void> held(argument, drop);
  auto* stream = handle ? stream_of((cudaStream_t)handle) : default_stream(device);
  if (*name) note(name);  // the second half of something has none
  enqueue(stream, kind, name, 0, [run, held] { run(held.get()); });
  return cudaSuccess;
} OR_ERROR

API void simulated_join(int to_device, void* to, int from_device, void* from) {
  auto* later = to ? (Stream*)to : default_stream(to_device);
  auto* first = from ? (Stream*)from : default_stream(from_device);
  Guard guard(mutex());
  if (is_lazy && later != first) give(later, {nullptr, first, first->given});
}

// -- streams -----------------------------------------------------------------------------------

API cudaError_t cudaStreamCreateWithPriority(cudaStream_t* stream, unsigned flags,
                                             int priority) try {
  ENTER();
  unsafe_in_captures();
  use_device();
  auto* made = new_stream(current_device, flags, priority);
  Guard guard(mutex());
  handles().streams.insert(made);
  *stream = (cudaStream_t)made;
  return cudaSuccess;
} OR_ERROR

API cudaError_t cudaStreamCreateWithFlags(cudaStream_t* stream, unsigned flags) {
  return cudaStreamCreateWithPriority(stream, flags, 0);
}

API cudaError_t cudaStreamCreate(cudaStream_t* stream) {
  return cudaStreamCreateWithPriority(stream, 0, 0);
}

API cudaError_t cudaStreamDestroy(cudaStream_t handle) try {
  ENTER();
  auto* stream = stream_of(handle);
  drain(stream);
  Guard guard(mutex());
  handles().streams.erase(stream);
  return cudaSuccess;
} OR_ERROR

API cudaError_t cudaStreamGetPriority(cudaStream_t handle, int* priority) try {
  *priority = stream_of(handle)->priority;
  return cudaSuccess;
} OR_ERROR

API cudaError_t cudaStreamQuery(cudaStream_t handle) try {
  ENTER();
  auto* stream = stream_of(handle);
  not_in_capture(stream->capture, cudaErrorStreamCaptureUnsupported);
  drain(stream);
  return now() >= stream->ready ? cudaSuccess : cudaErrorNotReady;
} OR_ERROR

API cudaError_t cudaStreamSynchronize(cudaStream_t handle) try {
  ENTER();
  auto* stream = stream_of(handle);
  not_in_capture(stream->capture, cudaErrorStreamCaptureUnsupported);
  unsafe_in_captures();
  host_waits("cudaStreamSynchronize", stream->ready);
  drain(stream);
  return cudaSuccess;
} OR_ERROR

API cudaError_t cudaDeviceSynchronize() try {
  ENTER();
  unsafe_in_captures();
  double until = 0;
  for (auto* stream : streams_of(current_device)) until = std::max(until, stream->ready);
  host_waits("cudaDeviceSynchronize", until);
  drain_device(current_device);
  return cudaSuccess;
} OR_ERROR

API cudaError_t cudaLaunchHostFunc(cudaStream_t handle, cudaHostFn_t function, void* data) try {
  ENTER();
  note("function of the host");
  enqueue(stream_of(handle), "host", "function of the host", 0, [=] { function(data); });
  return cudaSuccess;
} OR_ERROR

API cudaError_t cudaStreamAddCallback(cudaStream_t handle, cudaStreamCallback_t function,
                                      void* data, unsigned) try {
  ENTER();
  auto run = [=] { function(handle, cudaSuccess, data); };
  enqueue(stream_of(handle), "host", "callback", 0, run);
  return cudaSuccess;
} OR_ERROR

// -- events ------------------------------------------------------------------------------------

API cudaError_t cudaEventCreateWithFlags(cudaEvent_t* event, unsigned flags) try {
  ENTER();
  use_device();
  auto* made = new Event;
  made->device = current_device, made->flags = flags;
  Guard guard(mutex());
  handles().events.insert(made);
  *event = (cudaEvent_t)made;
  return cudaSuccess;
} OR_ERROR

API cudaError_t cudaEventCreate(cudaEvent_t* event) { return cudaEventCreateWithFlags(event, 0); }

API cudaError_t cudaEventDestroy(cudaEvent_t handle) try {
  ENTER();
  Guard guard(mutex());
  auto* event = event_of(handle);
  handles().events.erase(event);
  delete event;
  return cudaSuccess;
} OR_ERROR

API cudaError_t cudaEventRecordWithFlags(cudaEvent_t handle, cudaStream_t on, unsigned) try {
  ENTER();
  note("event record");
  Guard guard(mutex());
  auto* event = event_of(handle);
  auto* stream = stream_of(on);
  require(event->device == stream->device, cudaErrorInvalidResourceHandle);
  event->capture = stream->capture;
  if (auto& capture = stream->capture) {
    bool is_active = capture->status == cudaStreamCaptureStatusActive;
    require(is_active, cudaErrorStreamCaptureInvalidated);
    event->clock = capture->clocks[stream];
  } else {
    event->time = std::max(now(), stream->ready);
    event->stream = stream;
    event->upto = stream->given;
  }
  event->is_recorded = true;
  return cudaSuccess;
} OR_ERROR

API cudaError_t cudaEventRecord(cudaEvent_t event, cudaStream_t stream) {
  return cudaEventRecordWithFlags(event, stream, 0);
}

API cudaError_t cudaStreamWaitEvent(cudaStream_t handle, cudaEvent_t until, unsigned) try {
  ENTER();
  note("stream waits for event");
  Guard guard(mutex());
  auto* event = event_of(until);
  auto* stream = stream_of(handle);
  bool has_ended = event->capture && event->capture->status == cudaStreamCaptureStatusNone;
  if (has_ended) event->capture = nullptr;  // nothing to wait for
  if (event->capture) {
    if (stream->capture && stream->capture != event->capture) {
      stream->capture->invalidate(), event->capture->invalidate();
      throw cudaErrorStreamCaptureMerge;
    }
    stream->capture = event->capture;
    auto& clock = stream->capture->clocks[stream];
    for (auto& [other, number] : event->clock) clock[other] = std::max(clock[other], number);
  } else if (stream->capture) {
    if (event->is_recorded) {
      stream->capture->invalidate();
      throw cudaErrorStreamCaptureIsolation;
    }
  } else if (event->is_recorded) {
    stream->ready = std::max(stream->ready, event->time);
    if (is_lazy && event->stream && event->stream != stream)
      give(stream, {nullptr, event->stream, event->upto});
  }
  return cudaSuccess;
} OR_ERROR

static void not_in_active_capture(Event& event) {
  if (event.capture && event.capture->status == cudaStreamCaptureStatusActive)
    not_in_capture(event.capture, cudaErrorCapturedEvent);
}

API cudaError_t cudaEventQuery(cudaEvent_t handle) try {
  ENTER();
  auto* event = event_of(handle);
  not_in_active_capture(*event);
  unsafe_in_captures();
  if (!event->is_recorded) return cudaSuccess;
  if (is_lazy && event->stream) {
    bool is_pending;
    {
      Guard guard(mutex());
      is_pending = event->stream->done < event->upto;
    }
    if (is_pending && now() - event->time < POLLS) return cudaErrorNotReady;
    if (is_pending) drain(event->stream, event->upto);
  }
  return now() >= event->time ? cudaSuccess : cudaErrorNotReady;
} OR_ERROR

API cudaError_t cudaEventSynchronize(cudaEvent_t handle) try {
  ENTER();
  auto* event = event_of(handle);
  not_in_active_capture(*event);
  unsafe_in_captures();
  host_waits("cudaEventSynchronize", event->time);
  if (event->is_recorded) drain(event->stream, event->upto);
  return cudaSuccess;
} OR_ERROR

API cudaError_t cudaEventElapsedTime(float* milliseconds, cudaEvent_t begin, cudaEvent_t end) try {
  ENTER();
  auto *first = event_of(begin), *last = event_of(end);
  bool is_timed = !((first->flags | last->flags) & cudaEventDisableTiming);
  bool are_recorded = first->is_recorded && last->is_recorded;
  require(is_timed && are_recorded && first->device == last->device, cudaErrorInvalidResourceHandle);
  if (now() < last->time) return cudaErrorNotReady;
  *milliseconds = (float)((last->time - first->time) * 1e-3);
  return cudaSuccess;
} OR_ERROR
