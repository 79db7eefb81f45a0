// The machine that is not there: devices with their memory, and streams as queues of work that nobody has done yet.
//
//   call of torch ─► Work in the queue of a Lane ─► done when somebody may wait for it, or when the policy says so
//
// What is shared by the files of the fake runtime; one lock guards all of it.
#pragma once

#include <cuda_runtime_api.h>

#include <cstdint>
#include <deque>
#include <functional>
#include <map>
#include <memory>
#include <mutex>
#include <string>
#include <thread>
#include <vector>

namespace late {

constexpr int DEVICES_MAX = 8;
// A loop that polls must come to an end: a device goes on by itself, this one after so many looks.
constexpr int POLLS_MAX = 50;

struct Lane;
struct Capture;

// The number-th work of a lane; reached when the lane has done so many.
struct Place {
  Lane* lane;
  uint64_t number;
};

struct Work {
  const char* what;
  std::function<void()> run;
  std::vector<Place> behind = {};   // done before this
  const char* host = nullptr;       // pinned memory that it reads or writes
  size_t host_bytes = 0;
  bool until_waited = false;        // no policy does it: it lasts until somebody waits
};

// How far the lanes of a capture are known: an event brings it from one lane to another.
using Clock = std::map<Lane*, uint64_t>;

// A stream. Lanes live until the process ends: events may name them after they were destroyed.
struct Lane {
  int device = 0;
  int priority = 0;
  bool blocking = false;   // ordered with the default stream, as what is made without cudaStreamNonBlocking
  bool standard = false;   // the default stream of its device
  std::deque<Work> queue;
  uint64_t issued = 0, done = 0;
  int polls = 0;
  uint64_t copied_bytes[4] = {};   // by cudaMemcpyKind: host to device, device to host, device to device
  std::shared_ptr<Capture> capture;
  uint64_t captured = 0;
  Clock clock;
};

struct Capture {
  cudaStreamCaptureMode mode;
  std::thread::id thread;
  Lane* origin;
  unsigned long long id;
  std::vector<Lane*> lanes;
  std::vector<Work> works;
  bool invalidated = false, ended = false;
};

struct Event {
  int device;
  unsigned flags;
  bool recorded = false;
  Place place = {};
  std::shared_ptr<double> milliseconds;   // when the device came there
  std::shared_ptr<Capture> capture;
  Clock clock;
  int polls = 0;
};

// Every call of the runtime holds it, work of a device too: that is host code here.
extern std::recursive_mutex mutex;

// -- devices and their memory (memory.cpp) --
extern int devices;
int current_device();
void set_current_device(int device);
size_t device_bytes(int device);
bool on_device(const void* pointer);
bool on_pinned(const void* pointer, size_t bytes);
void release_unused(int device);     // somebody has waited for it
char* behind(const void* pointer);   // where the executor reads and writes what a program sees as `pointer`

// -- lanes (lanes.cpp) --
Lane* lane_of(cudaStream_t stream);
Lane* new_lane(unsigned flags, int priority);
// Queues work, or puts it into the graph that the lane captures.
cudaError_t put(Lane* lane, Work work);
cudaError_t spin(Lane* lane);   // busy until somebody waits
void finish(Lane* lane, uint64_t number);
void finish_device(int device);
void finish_all();
bool touched(const char* host, size_t bytes);   // by work that is queued
uint64_t pending();

// -- captures (captures.cpp) --
// Whether this call may not be made beside a capture in progress, which it then invalidates.
bool prohibited();
void invalidate(Capture& capture);

// -- errors, faults, counters (controls.cpp) --
cudaError_t say(cudaError_t error);
cudaError_t enter(const char* call);   // counts it; the error that a test has ordered for it
void violate(const std::string& what);
void broke(cudaError_t error);         // the device, for good
cudaError_t outcome();                 // of the work that was waited for
void count(const char* what, uint64_t more = 1);
void roll();                           // by dice: some stream that can goes on by one

}  // namespace late

// A call begins: under the lock, and failing where a test wants it to.
#define LATE_ENTER(call)                             \
  std::lock_guard<std::recursive_mutex> held(late::mutex); \
  if (cudaError_t refused = late::enter(call)) return late::say(refused)

// The same for a call that CUDA calls potentially unsafe while a stream is captured.
#define LATE_ENTER_UNSAFE(call) \
  LATE_ENTER(call);             \
  if (late::prohibited()) return late::say(cudaErrorStreamCaptureUnsupported)
