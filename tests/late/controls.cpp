// What a test asks and orders: policies, counters, faults; and the errors that calls leave behind.
#include "machine.h"

#include <cstdlib>
#include <cstring>
#include <random>

namespace late {
std::recursive_mutex mutex;

namespace {
enum Policy { SIDE_LAZY, LAZY, EAGER, DICE };
Policy policy = SIDE_LAZY;
std::mt19937_64 dice(1);
std::string violations;
thread_local cudaError_t last_error = cudaSuccess;
cudaError_t broken = cudaSuccess;

struct Fault {
  std::string call;   // a name of the runtime, or "any"
  uint64_t skipped, times;
  cudaError_t error;
  bool lasting;
};
std::vector<Fault> faults;
std::map<std::string, uint64_t> counts;
thread_local std::map<std::string, uint64_t> own_counts;

bool choose(const std::string& name) {
  if (name == "side_lazy") policy = SIDE_LAZY;
  else if (name == "lazy") policy = LAZY;
  else if (name == "eager") policy = EAGER;
  else if (name.rfind("dice:", 0) == 0) { policy = DICE; dice.seed(strtoull(name.c_str() + 5, nullptr, 10)); }
  else return false;
  return true;
}
const bool chosen = [] { const char* name = getenv("LATE_POLICY"); return !name || choose(name) || (abort(), false); }();
}  // namespace

// Whether work is done the moment it is queued.
bool at_once(const Lane* lane) { return policy == EAGER || (policy == SIDE_LAZY && lane->standard); }

uint64_t thrown_of(uint64_t sides) { return dice() % sides; }
bool by_dice() { return policy == DICE; }

cudaError_t say(cudaError_t error) {
  if (error != cudaSuccess) last_error = error;
  return error;
}
void violate(const std::string& what) { violations += what + "\n"; }
void broke(cudaError_t error) { broken = error; }
cudaError_t outcome() { return broken; }
void count(const char* what, uint64_t more) { counts[what] += more; own_counts[what] += more; }

cudaError_t enter(const char* call) {
  roll();
  if (broken != cudaSuccess) return broken;
  count(call);
  for (auto& fault : faults) {
    if (fault.call != call && fault.call != "any") continue;
    if (fault.skipped) { --fault.skipped; continue; }
    if (!fault.times) continue;
    --fault.times;
    if (fault.lasting) broken = fault.error;
    return fault.error;
  }
  return cudaSuccess;
}
}  // namespace late

using namespace late;

extern "C" {
int late_policy(const char* name) {
  std::lock_guard held(mutex);
  return choose(name) ? 0 : 1;
}
// The calls of this name fail: after `skipped` of them so many `times`. A lasting error is that of each call from then on.
void late_fail(const char* call, uint64_t skipped, uint64_t times, int error, int lasting) {
  std::lock_guard held(mutex);
  faults.push_back({call, skipped, times, (cudaError_t)error, lasting != 0});
}
void late_heal() {
  std::lock_guard held(mutex);
  faults.clear();
  broken = last_error = cudaSuccess;
}
uint64_t late_count(const char* what, int of_this_thread) {
  std::lock_guard held(mutex);
  auto& from = of_this_thread ? own_counts : counts;
  auto found = from.find(what);
  return found == from.end() ? 0 : found->second;
}
// Something that kernels.cpp wants counted.
void late_note(const char* what) {
  std::lock_guard held(mutex);
  count(what);
}
uint64_t late_pending() {
  std::lock_guard held(mutex);
  return pending();
}
uint64_t late_copied_bytes(cudaStream_t stream, int kind) {
  std::lock_guard held(mutex);
  return lane_of(stream)->copied_bytes[kind & 3];
}
const char* late_violations() {
  std::lock_guard held(mutex);
  thread_local std::string told;
  told = violations;
  violations.clear();
  return told.c_str();
}

cudaError_t cudaGetLastError() {
  std::lock_guard held(mutex);
  if (broken != cudaSuccess) return broken;
  auto error = last_error;
  last_error = cudaSuccess;
  return error;
}
cudaError_t cudaPeekAtLastError() {
  std::lock_guard held(mutex);
  return broken != cudaSuccess ? broken : last_error;
}
const char* cudaGetErrorName(cudaError_t error) {
  thread_local char text[32];
  snprintf(text, sizeof text, "cudaError %d", (int)error);
  return text;
}
const char* cudaGetErrorString(cudaError_t error) {
  switch (error) {
    case cudaErrorMemoryAllocation: return "out of memory";
    case cudaErrorIllegalAddress: return "an illegal memory access was encountered";
    case cudaErrorHostMemoryAlreadyRegistered: return "part or all of the requested memory range is already mapped";
    case cudaErrorInvalidResourceHandle: return "invalid resource handle";
    case cudaErrorStreamCaptureUnsupported: return "operation not permitted when stream is capturing";
    case cudaErrorStreamCaptureInvalidated: return "operation failed due to a previous error during capture";
    case cudaErrorNotSupported: return "operation not supported";
    default: return cudaGetErrorName(error);
  }
}
}
