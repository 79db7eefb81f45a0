// Graphs: work of captured streams is written down instead of queued, and each launch queues all of it again.
//
// The works of a graph are done in the order of their capture, also those of branches beside each other: a wait that is
// missing inside a graph does not show here, unless nothing joins the branch again.
#include "machine.h"

namespace late {
namespace {
std::vector<std::shared_ptr<Capture>> captures;   // in progress
unsigned long long last_id = 0;
thread_local cudaStreamCaptureMode thread_mode = cudaStreamCaptureModeGlobal;

struct Graph {
  std::vector<Work> works;
};
}  // namespace

void invalidate(Capture& capture) { capture.invalidated = true; }

// As the documentation of cudaThreadExchangeStreamCaptureMode says it.
bool prohibited() {
  if (thread_mode == cudaStreamCaptureModeRelaxed) return false;
  bool found = false;
  for (auto& capture : captures) {
    bool own = capture->thread == std::this_thread::get_id();
    bool heeds = own ? capture->mode != cudaStreamCaptureModeRelaxed
                     : capture->mode == cudaStreamCaptureModeGlobal && thread_mode == cudaStreamCaptureModeGlobal;
    if (!heeds) continue;
    invalidate(*capture);
    found = true;
  }
  return found;
}
}  // namespace late

using namespace late;

extern "C" {
cudaError_t cudaThreadExchangeStreamCaptureMode(cudaStreamCaptureMode* mode) {
  std::swap(*mode, thread_mode);
  return cudaSuccess;
}
cudaError_t cudaStreamBeginCapture(cudaStream_t stream, cudaStreamCaptureMode mode) {
  LATE_ENTER("cudaStreamBeginCapture");
  auto* lane = lane_of(stream);
  if (lane->standard) return say(cudaErrorStreamCaptureUnsupported);
  if (lane->capture) return say(cudaErrorIllegalState);
  lane->capture = std::make_shared<Capture>(Capture{mode, std::this_thread::get_id(), lane, ++last_id, {lane}});
  lane->captured = 0;
  lane->clock.clear();
  captures.push_back(lane->capture);
  return cudaSuccess;
}
cudaError_t cudaStreamEndCapture(cudaStream_t stream, cudaGraph_t* graph) {
  LATE_ENTER("cudaStreamEndCapture");
  *graph = nullptr;
  auto* lane = lane_of(stream);
  auto capture = lane->capture;
  if (!capture) return say(cudaErrorIllegalState);
  if (capture->origin != lane) {
    invalidate(*capture);
    return say(cudaErrorStreamCaptureUnmatched);
  }
  if (capture->mode != cudaStreamCaptureModeRelaxed && capture->thread != std::this_thread::get_id())
    return say(cudaErrorStreamCaptureWrongThread);
  bool joined = true;
  for (auto* other : capture->lanes) {
    joined = joined && lane->clock[other] >= other->captured;
    other->capture = nullptr;
  }
  capture->ended = true;
  std::erase(captures, capture);
  if (capture->invalidated) return say(cudaErrorStreamCaptureInvalidated);
  if (!joined) return say(cudaErrorStreamCaptureUnjoined);
  *graph = (cudaGraph_t) new Graph{capture->works};
  return cudaSuccess;
}
cudaError_t cudaStreamIsCapturing(cudaStream_t stream, cudaStreamCaptureStatus* status) {
  std::lock_guard held(mutex);
  auto& capture = lane_of(stream)->capture;
  *status = !capture               ? cudaStreamCaptureStatusNone
            : capture->invalidated ? cudaStreamCaptureStatusInvalidated
                                   : cudaStreamCaptureStatusActive;
  return cudaSuccess;
}
cudaError_t cudaStreamGetCaptureInfo(cudaStream_t stream, cudaStreamCaptureStatus* status, unsigned long long* id,
                                     cudaGraph_t* graph, const cudaGraphNode_t** nodes, const cudaGraphEdgeData** edges,
                                     size_t* count_of_nodes) {
  std::lock_guard held(mutex);
  cudaStreamIsCapturing(stream, status);
  auto& capture = lane_of(stream)->capture;
  if (id) *id = capture ? capture->id : 0;
  if (graph) *graph = (cudaGraph_t)capture.get();
  if (nodes) *nodes = nullptr;
  if (edges) *edges = nullptr;
  if (count_of_nodes) *count_of_nodes = 0;
  return cudaSuccess;
}
cudaError_t cudaGraphGetNodes(cudaGraph_t graph, cudaGraphNode_t*, size_t* count_of_nodes) {
  std::lock_guard held(mutex);
  *count_of_nodes = ((Graph*)graph)->works.size();
  return cudaSuccess;
}
cudaError_t cudaGraphInstantiate(cudaGraphExec_t* exec, cudaGraph_t graph, unsigned long long) {
  LATE_ENTER("cudaGraphInstantiate");
  *exec = (cudaGraphExec_t) new Graph(*(Graph*)graph);
  return cudaSuccess;
}
cudaError_t cudaGraphInstantiateWithFlags(cudaGraphExec_t* exec, cudaGraph_t graph, unsigned long long flags) {
  return cudaGraphInstantiate(exec, graph, flags);
}
cudaError_t cudaGraphLaunch(cudaGraphExec_t exec, cudaStream_t stream) {
  LATE_ENTER("cudaGraphLaunch");
  auto works = ((Graph*)exec)->works;  // the graph may be gone when its work is done
  return say(put(lane_of(stream), {"graph", [works] {
                                     for (auto& work : works)
                                       if (work.run) work.run();
                                   }}));
}
cudaError_t cudaGraphExecDestroy(cudaGraphExec_t exec) {
  std::lock_guard held(mutex);
  delete (Graph*)exec;
  return cudaSuccess;
}
cudaError_t cudaGraphDestroy(cudaGraph_t graph) {
  std::lock_guard held(mutex);
  delete (Graph*)graph;
  return cudaSuccess;
}
}
