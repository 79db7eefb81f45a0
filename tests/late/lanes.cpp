// Streams and events: what is queued, in which order it is done, and who makes it be done.
#include "machine.h"

#include <chrono>
#include <exception>

namespace late {
bool at_once(const Lane*);
bool by_dice();
uint64_t thrown_of(uint64_t sides);

namespace {
Lane standards[DEVICES_MAX];
std::vector<Lane*> lanes;
// Kernels that spin and are not done: a device is busy until somebody waits for it, whatever the policy.
int spinning = 0;

const bool made = [] {
  for (int device = 0; device < DEVICES_MAX; ++device) {
    standards[device].device = device;
    standards[device].standard = true;
    lanes.push_back(&standards[device]);
  }
  return true;
}();

double now_milliseconds() {
  auto now = std::chrono::steady_clock::now().time_since_epoch();
  return std::chrono::duration<double, std::milli>(now).count();
}
bool can_go_on(const Lane* lane) {
  if (lane->queue.empty() || lane->queue.front().until_waited) return false;
  for (auto& place : lane->queue.front().behind)
    if (place.lane->done < place.number) return false;
  return true;
}
}  // namespace

Lane* lane_of(cudaStream_t stream) {
  if (stream == nullptr || stream == cudaStreamLegacy) return &standards[current_device()];
  if (stream == cudaStreamPerThread) {
    violate("the default stream of a thread is not emulated");
    return &standards[current_device()];
  }
  return (Lane*)stream;
}
Lane* new_lane(unsigned flags, int priority) {
  auto* lane = new Lane;
  lane->device = current_device();
  lane->priority = priority;
  lane->blocking = !(flags & cudaStreamNonBlocking);
  lanes.push_back(lane);
  return lane;
}
void finish(Lane* lane, uint64_t number) {
  while (lane->done < number) {
    // What it waits for was queued earlier, so that never comes back to this lane.
    for (auto& place : std::vector<Place>(lane->queue.front().behind)) finish(place.lane, place.number);
    Work work = std::move(lane->queue.front());
    lane->queue.pop_front();
    ++lane->done;
    try {
      if (work.run) work.run();
    } catch (const std::exception& error) {  // a device-side assertion, say: an index out of its bounds
      violate(std::string(work.what) + ": " + error.what());
      broke(cudaErrorAssert);
    }
  }
}
void finish_device(int device) {
  for (auto* lane : std::vector<Lane*>(lanes))
    if (lane->device == device) finish(lane, lane->issued);
}
void finish_all() {
  for (auto* lane : std::vector<Lane*>(lanes)) finish(lane, lane->issued);
}
uint64_t pending() {
  uint64_t sum = 0;
  for (auto* lane : lanes) sum += lane->queue.size();
  return sum;
}
bool touched(const char* host, size_t bytes) {
  for (auto* lane : lanes)
    for (auto& work : lane->queue)
      if (work.host && work.host < host + bytes && host < work.host + work.host_bytes) return true;
  return false;
}
void roll() {
  if (!by_dice()) return;
  for (auto throws = thrown_of(4); throws; --throws) {
    // Of those that can: how many streams there are besides must not change how the dice fall.
    std::vector<Lane*> able;
    for (auto* lane : lanes)
      if (can_go_on(lane)) able.push_back(lane);
    if (able.empty()) return;
    Lane* lane = able[thrown_of(able.size())];
    finish(lane, lane->done + 1);
  }
}
cudaError_t put(Lane* lane, Work work) {
  if (lane->capture) {
    if (lane->capture->invalidated) return cudaErrorStreamCaptureInvalidated;
    lane->capture->works.push_back(std::move(work));
    lane->clock[lane] = ++lane->captured;
    return cudaSuccess;
  }
  // The default stream and those that are not marked as non-blocking wait for each other.
  for (auto* other : lanes) {
    if (other->device != lane->device || !((lane->standard && other->blocking) || (lane->blocking && other->standard))) continue;
    if (other->capture) {
      invalidate(*other->capture);
      return cudaErrorStreamCaptureImplicit;
    }
    if (other->done < other->issued) work.behind.push_back({other, other->issued});
  }
  lane->queue.push_back(std::move(work));
  ++lane->issued;
  lane->polls = 0;
  if (!spinning && at_once(lane)) finish(lane, lane->issued);
  return cudaSuccess;
}
cudaError_t spin(Lane* lane) {
  if (lane->capture) return put(lane, {"spin", nullptr});
  ++spinning;
  return put(lane, {"spin", [] { --spinning; }, {}, nullptr, 0, true});
}
}  // namespace late

using namespace late;

namespace {
cudaError_t record(cudaEvent_t handle, cudaStream_t stream) {
  auto* event = (Event*)handle;
  auto* lane = lane_of(stream);
  if (event->device != lane->device) return say(cudaErrorInvalidResourceHandle);
  event->polls = 0;
  if (lane->capture) {
    if (lane->capture->invalidated) return say(cudaErrorStreamCaptureInvalidated);
    event->capture = lane->capture;
    event->clock = lane->clock;
    return cudaSuccess;
  }
  auto at = std::make_shared<double>(0);
  if (auto error = put(lane, {"record", [at] { *at = now_milliseconds(); }})) return say(error);
  event->recorded = true;
  event->capture = nullptr;
  event->place = {lane, lane->issued};
  event->milliseconds = at;
  return cudaSuccess;
}
// An event of a capture is a place in a graph: the host cannot wait for it.
cudaError_t captured(Event* event) {
  if (!event->capture) return cudaSuccess;
  if (!event->capture->ended) invalidate(*event->capture);
  return cudaErrorCapturedEvent;
}
bool reached(const Event* event) { return !event->recorded || event->place.lane->done >= event->place.number; }
// A stream that is captured has nothing queued that could be waited for.
cudaError_t capturing(Lane* lane) {
  if (!lane->capture) return cudaSuccess;
  invalidate(*lane->capture);
  return cudaErrorStreamCaptureUnsupported;
}
}  // namespace

extern "C" {
cudaError_t cudaStreamCreateWithPriority(cudaStream_t* stream, unsigned flags, int priority) {
  LATE_ENTER("cudaStreamCreate");
  *stream = (cudaStream_t)new_lane(flags, priority);
  return cudaSuccess;
}
cudaError_t cudaStreamCreateWithFlags(cudaStream_t* stream, unsigned flags) { return cudaStreamCreateWithPriority(stream, flags, 0); }
cudaError_t cudaStreamCreate(cudaStream_t* stream) { return cudaStreamCreateWithPriority(stream, cudaStreamDefault, 0); }
cudaError_t cudaStreamDestroy(cudaStream_t) {
  LATE_ENTER("cudaStreamDestroy");
  return cudaSuccess;  // what is queued is still done, when it is
}
cudaError_t cudaStreamGetPriority(cudaStream_t stream, int* priority) {
  std::lock_guard held(mutex);
  *priority = lane_of(stream)->priority;
  return cudaSuccess;
}
cudaError_t cudaStreamSynchronize(cudaStream_t stream) {
  LATE_ENTER_UNSAFE("cudaStreamSynchronize");
  auto* lane = lane_of(stream);
  if (auto error = capturing(lane)) return say(error);
  count("host_waits");
  finish(lane, lane->issued);
  release_unused(lane->device);
  return say(outcome());
}
cudaError_t cudaStreamQuery(cudaStream_t stream) {
  LATE_ENTER_UNSAFE("cudaStreamQuery");
  auto* lane = lane_of(stream);
  if (auto error = capturing(lane)) return say(error);
  if (lane->done < lane->issued && ++lane->polls > POLLS_MAX) finish(lane, lane->issued);
  return lane->done == lane->issued ? cudaSuccess : cudaErrorNotReady;
}
cudaError_t cudaStreamWaitEvent(cudaStream_t stream, cudaEvent_t handle, unsigned) {
  LATE_ENTER("cudaStreamWaitEvent");
  auto* lane = lane_of(stream);
  auto* event = (Event*)handle;
  if (event->capture) {
    if (event->capture->ended) return say(cudaErrorCapturedEvent);
    if (!lane->capture) {  // it joins the capture
      lane->capture = event->capture;
      lane->captured = 0;
      lane->clock = event->clock;
      lane->capture->lanes.push_back(lane);
      return cudaSuccess;
    }
    if (lane->capture != event->capture) {
      invalidate(*lane->capture);
      invalidate(*event->capture);
      return say(cudaErrorStreamCaptureMerge);
    }
    for (auto& [other, number] : event->clock) lane->clock[other] = std::max(lane->clock[other], number);
    return cudaSuccess;
  }
  if (!event->recorded) return cudaSuccess;
  if (lane->capture) {  // a graph cannot wait for what was queued outside of it
    invalidate(*lane->capture);
    return say(cudaErrorStreamCaptureIsolation);
  }
  return say(put(lane, {"wait", nullptr, {event->place}}));
}
cudaError_t cudaLaunchHostFunc(cudaStream_t stream, cudaHostFn_t call, void* data) {
  LATE_ENTER("cudaLaunchHostFunc");
  return say(put(lane_of(stream), {"host function", [=] { call(data); }}));
}
cudaError_t cudaStreamAddCallback(cudaStream_t stream, cudaStreamCallback_t call, void* data, unsigned) {
  LATE_ENTER("cudaStreamAddCallback");
  return say(put(lane_of(stream), {"callback", [=] { call(stream, cudaSuccess, data); }}));
}
cudaError_t cudaDeviceSynchronize() {
  LATE_ENTER_UNSAFE("cudaDeviceSynchronize");
  for (auto* lane : lanes)
    if (lane->device == current_device())
      if (auto error = capturing(lane)) return say(error);
  count("host_waits");
  finish_device(current_device());
  release_unused(current_device());
  return say(outcome());
}

cudaError_t cudaEventCreateWithFlags(cudaEvent_t* event, unsigned flags) {
  LATE_ENTER("cudaEventCreate");
  *event = (cudaEvent_t) new Event{current_device(), flags};
  return cudaSuccess;
}
cudaError_t cudaEventCreate(cudaEvent_t* event) { return cudaEventCreateWithFlags(event, cudaEventDefault); }
cudaError_t cudaEventDestroy(cudaEvent_t event) {
  LATE_ENTER("cudaEventDestroy");
  delete (Event*)event;
  return cudaSuccess;
}
cudaError_t cudaEventRecord(cudaEvent_t event, cudaStream_t stream) {
  LATE_ENTER("cudaEventRecord");
  return record(event, stream);
}
cudaError_t cudaEventRecordWithFlags(cudaEvent_t event, cudaStream_t stream, unsigned flags) {
  LATE_ENTER("cudaEventRecord");
  if (flags & cudaEventRecordExternal && lane_of(stream)->capture) return say(cudaErrorNotSupported);
  return record(event, stream);
}
cudaError_t cudaEventSynchronize(cudaEvent_t handle) {
  LATE_ENTER_UNSAFE("cudaEventSynchronize");
  auto* event = (Event*)handle;
  if (auto error = captured(event)) return say(error);
  count("host_waits");
  if (!(event->flags & cudaEventBlockingSync)) count("spinning_waits");
  if (!reached(event)) finish(event->place.lane, event->place.number);
  release_unused(event->device);
  return say(outcome());
}
cudaError_t cudaEventQuery(cudaEvent_t handle) {
  LATE_ENTER_UNSAFE("cudaEventQuery");
  auto* event = (Event*)handle;
  if (auto error = captured(event)) return say(error);
  if (!reached(event) && ++event->polls > POLLS_MAX) finish(event->place.lane, event->place.number);
  return reached(event) ? cudaSuccess : cudaErrorNotReady;
}
cudaError_t cudaEventElapsedTime(float* milliseconds, cudaEvent_t from, cudaEvent_t to) {
  LATE_ENTER("cudaEventElapsedTime");
  auto *first = (Event*)from, *second = (Event*)to;
  if (!first->recorded || !second->recorded || first->device != second->device) return say(cudaErrorInvalidResourceHandle);
  if (!reached(first) || !reached(second)) return say(cudaErrorNotReady);
  *milliseconds = float(*second->milliseconds - *first->milliseconds);
  return cudaSuccess;
}
}
