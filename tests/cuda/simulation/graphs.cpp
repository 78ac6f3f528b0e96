// Captures of streams into graphs, what may not be done meanwhile, and launches of graphs.

#include <algorithm>
#include <utility>

#include "runtime.h"

namespace simulated {

static thread_local cudaStreamCaptureMode thread_mode = cudaStreamCaptureModeGlobal;

static std::atomic<int> number_of_captures{0};

static std::vector<std::shared_ptr<Capture>>& captures() {
  static auto* made = new std::vector<std::shared_ptr<Capture>>;
  return *made;
}

void unsafe_in_captures() {
  if (!number_of_captures || thread_mode == cudaStreamCaptureModeRelaxed) return;
  Guard guard(mutex());
  bool is_prohibited = false;
  for (auto& capture : captures()) {
    bool is_own = pthread_equal(capture->owner, pthread_self());
    bool prohibits = is_own ? capture->mode != cudaStreamCaptureModeRelaxed
                            : thread_mode == cudaStreamCaptureModeGlobal &&
                                  capture->mode == cudaStreamCaptureModeGlobal;
    if (prohibits) capture->invalidate();
    is_prohibited |= prohibits;
  }
  require(!is_prohibited, cudaErrorStreamCaptureUnsupported);
}

void check_captures(const Stream& stream) {
  if (!number_of_captures || stream.flags & cudaStreamNonBlocking) return;
  for (auto& capture : captures()) {
    auto& origin = *capture->origin;
    if (origin.device != stream.device || origin.flags & cudaStreamNonBlocking) continue;
    capture->invalidate();
    throw cudaErrorStreamCaptureImplicit;
  }
}

void not_in_capture(const std::shared_ptr<Capture>& capture, Error error) {
  Guard guard(mutex());
  if (!capture) return;
  capture->invalidate();
  throw error;
}

void add_node(Stream* stream, Node node) {
  auto& capture = *stream->capture;
  require(capture.status == cudaStreamCaptureStatusActive, cudaErrorStreamCaptureInvalidated);
  count("captured/" + node.kind);
  capture.graph->nodes.push_back(std::move(node));
  capture.clocks[stream][stream] = ++capture.operations[stream];
}

}  // namespace simulated

using namespace simulated;

API cudaError_t cudaThreadExchangeStreamCaptureMode(cudaStreamCaptureMode* mode) {
  std::swap(*mode, thread_mode);
  return cudaSuccess;
}

API cudaError_t cudaStreamBeginCapture(cudaStream_t handle, cudaStreamCaptureMode mode) try {
  ENTER();
  note("begin of capture");
  require(handle && handle != cudaStreamLegacy, cudaErrorStreamCaptureUnsupported);
  Guard guard(mutex());
  auto* stream = stream_of(handle);
  require(!stream->capture, cudaErrorIllegalState);
  stream->capture = std::make_shared<Capture>(Capture{next_id(), mode, stream});
  stream->capture->clocks[stream];
  captures().push_back(stream->capture);
  ++number_of_captures;
  return cudaSuccess;
} OR_ERROR

API cudaError_t cudaStreamEndCapture(cudaStream_t handle, cudaGraph_t* graph) try {
  ENTER();
  note("end of capture");
  *graph = nullptr;
  Guard guard(mutex());
  auto* stream = stream_of(handle);
  auto capture = stream->capture;
  require(capture != nullptr, cudaErrorIllegalState);
  if (capture->origin != stream) {
    capture->invalidate();
    throw cudaErrorStreamCaptureUnmatched;
  }
  bool is_owner = pthread_equal(capture->owner, pthread_self());
  bool may_end = is_owner || capture->mode == cudaStreamCaptureModeRelaxed;
  require(may_end, cudaErrorStreamCaptureWrongThread);
  bool is_joined = true;
  for (auto& [other, number] : capture->operations)
    is_joined = is_joined && capture->clocks[stream][other] >= number;
  auto status = std::exchange(capture->status, cudaStreamCaptureStatusNone);
  for (auto& [other, _] : capture->clocks) other->capture = nullptr;
  captures().erase(std::find(captures().begin(), captures().end(), capture));
  --number_of_captures;
  require(status == cudaStreamCaptureStatusActive, cudaErrorStreamCaptureInvalidated);
  require(is_joined, cudaErrorStreamCaptureUnjoined);
  *graph = (cudaGraph_t)capture->graph.release();
  return cudaSuccess;
} OR_ERROR

API cudaError_t cudaStreamIsCapturing(cudaStream_t handle, cudaStreamCaptureStatus* status) try {
  *status = cudaStreamCaptureStatusNone;
  auto* stream = stream_of(handle);
  if (!number_of_captures) return cudaSuccess;
  Guard guard(mutex());
  if (stream->capture)
    *status = stream->capture->status;
  else if (!handle || handle == cudaStreamLegacy)
    for (auto& capture : captures()) {
      auto& origin = *capture->origin;
      bool depends = origin.device == stream->device && !(origin.flags & cudaStreamNonBlocking);
      require(!depends, cudaErrorStreamCaptureImplicit);
    }
  return cudaSuccess;
} OR_ERROR

#undef cudaStreamGetCaptureInfo
#undef cudaStreamUpdateCaptureDependencies

API cudaError_t cudaStreamGetCaptureInfo(cudaStream_t handle, cudaStreamCaptureStatus* status,
                                         unsigned long long* id, cudaGraph_t* graph,
                                         const cudaGraphNode_t** dependencies,
                                         const cudaGraphEdgeData** edges, size_t* number) try {
  Guard guard(mutex());
  auto& capture = stream_of(handle)->capture;
  *status = capture ? capture->status : cudaStreamCaptureStatusNone;
  if (id) *id = capture ? capture->id : 0;
  if (graph) *graph = capture ? (cudaGraph_t)capture->graph.get() : nullptr;
  if (dependencies) *dependencies = nullptr;
  if (edges) *edges = nullptr;
  if (number) *number = 0;
  return cudaSuccess;
} OR_ERROR

API cudaError_t cudaStreamUpdateCaptureDependencies(cudaStream_t, cudaGraphNode_t*,
                                                    const cudaGraphEdgeData*, size_t, unsigned) {
  return cudaSuccess;
}

// -- graphs ------------------------------------------------------------------------------------

API cudaError_t cudaGraphDestroy(cudaGraph_t graph) {
  delete (Graph*)graph;
  return cudaSuccess;
}

API cudaError_t cudaGraphGetNodes(cudaGraph_t graph, cudaGraphNode_t* nodes, size_t* number) {
  auto& all = ((Graph*)graph)->nodes;
  for (size_t i = 0; nodes && i < std::min(*number, all.size()); ++i)
    nodes[i] = (cudaGraphNode_t)&all[i];
  *number = all.size();
  return cudaSuccess;
}

// A graph that can be launched is a copy.
API cudaError_t cudaGraphInstantiateWithFlags(cudaGraphExec_t* made, cudaGraph_t graph,
                                              unsigned long long) try {
  ENTER();
  unsafe_in_captures();
  *made = (cudaGraphExec_t) new Graph(*(Graph*)graph);
  return cudaSuccess;
} OR_ERROR

API cudaError_t cudaGraphExecDestroy(cudaGraphExec_t graph) {
  delete (Graph*)graph;
  return cudaSuccess;
}

API cudaError_t cudaGraphLaunch(cudaGraphExec_t graph, cudaStream_t handle) try {
  ENTER();
  note("graph launch");
  auto* stream = stream_of(handle);
  for (auto& node : ((Graph*)graph)->nodes) {
    count("replayed/" + node.kind);
    enqueue(stream, node.kind.c_str(), node.name, node.duration, node.run);
  }
  return cudaSuccess;
} OR_ERROR

API cudaError_t cudaUserObjectCreate(cudaUserObject_t* made, void*, cudaHostFn_t, unsigned,
                                     unsigned) {
  static char only;
  *made = (cudaUserObject_t)&only;
  return cudaSuccess;
}

API cudaError_t cudaGraphRetainUserObject(cudaGraph_t, cudaUserObject_t, unsigned, unsigned) {
  return cudaSuccess;
}

API cudaError_t cudaDeviceGetGraphMemAttribute(int, cudaGraphMemAttributeType, void* value) {
  *(unsigned long long*)value = 0;
  return cudaSuccess;
}
