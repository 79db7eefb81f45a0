// Memory of the devices, pinned memory of the host, and copies between them.
//
// The addresses of a device cannot be touched by a program: they are mapped without any right. The executor works on
// the same pages behind other addresses. Fresh memory is full of 0xEE, so what was never copied shows.
#include "machine.h"

#include <fcntl.h>
#include <sys/mman.h>
#include <sys/vfs.h>
#include <unistd.h>

#include <algorithm>
#include <cstdlib>
#include <cstring>
#include <fstream>
#include <sstream>
#include <string>
#include <utility>

namespace late {
int devices = [] { const char* text = getenv("LATE_DEVICES"); return text ? atoi(text) : 1; }();

namespace {
constexpr int FRESH = 0xEE;
constexpr size_t UNIT = 512;
constexpr size_t PAGE = 4096;

struct Arena {
  size_t bytes = 0, taken_bytes = 0;
  int file = -1;
  char *seen = nullptr, *behind = nullptr;
  std::map<size_t, size_t> free, taken;   // offset and bytes
  std::vector<void*> unused;              // taken by the default pool, for whoever asks it next
};
Arena arenas[DEVICES_MAX];
std::map<const char*, size_t> pinned;
std::map<const char*, size_t> allocated;   // of `pinned` what cudaHostAlloc gave
thread_local int current = 0;

[[noreturn]] void give_up(const char* what) {
  perror(what);
  abort();
}
Arena& arena(int device) {
  Arena& made = arenas[device];
  if (made.seen) return made;
  const char* text = getenv("LATE_MIB");
  made.bytes = size_t(text ? atol(text) : 1024) << 20;
  made.file = memfd_create("device", 0);
  if (made.file < 0 || ftruncate(made.file, made.bytes)) give_up("memory of a device");
  made.behind = (char*)mmap(nullptr, made.bytes, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_NORESERVE, made.file, 0);
  made.seen = (char*)mmap(nullptr, made.bytes, PROT_NONE, MAP_SHARED | MAP_NORESERVE, made.file, 0);
  if (made.behind == MAP_FAILED || made.seen == MAP_FAILED) give_up("memory of a device");
  made.free[0] = made.bytes;
  return made;
}
int device_of(const void* pointer) {
  for (int device = 0; device < devices; ++device) {
    auto& one = arenas[device];
    if (one.seen && (char*)pointer >= one.seen && (char*)pointer < one.seen + one.bytes) return device;
  }
  return -1;
}

// Memory that nobody has mapped yet: a driver maps it only when the device has come to the end of all that is queued.
cudaError_t take(int device, void** pointer, size_t bytes) {
  auto& from = arena(device);
  bytes = (bytes + UNIT - 1) / UNIT * UNIT;
  count("host_waits");
  count("mapped_bytes", bytes);
  finish_device(device);
  for (auto one = from.free.begin(); one != from.free.end(); ++one) {
    if (one->second < bytes) continue;
    auto [at, room] = *one;
    from.free.erase(one);
    if (room > bytes) from.free[at + bytes] = room - bytes;
    from.taken[at] = bytes;
    from.taken_bytes += bytes;
    memset(from.behind + at, FRESH, bytes);
    *pointer = from.seen + at;
    return cudaSuccess;
  }
  return cudaErrorMemoryAllocation;
}
cudaError_t give_back(int device, void* pointer) {
  auto& to = arenas[device];
  size_t at = (char*)pointer - to.seen;
  auto found = to.taken.find(at);
  if (found == to.taken.end()) return cudaErrorInvalidValue;
  size_t bytes = found->second;
  to.taken.erase(found);
  to.taken_bytes -= bytes;
  fallocate(to.file, FALLOC_FL_PUNCH_HOLE | FALLOC_FL_KEEP_SIZE, at, bytes);  // the host gets its pages back
  auto one = to.free.emplace(at, bytes).first;
  if (auto next = std::next(one); next != to.free.end() && at + bytes == next->first) {
    one->second += next->second;
    to.free.erase(next);
  }
  if (one != to.free.begin())
    if (auto before = std::prev(one); before->first + before->second == at) {
      before->second += one->second;
      to.free.erase(one);
    }
  return cudaSuccess;
}

// What the default pool has and does not use, of the same size.
bool take_unused(int device, void** pointer, size_t bytes) {
  auto& of = arena(device);
  for (auto one = of.unused.begin(); one != of.unused.end(); ++one) {
    if (of.taken[(char*)*one - of.seen] != (bytes + UNIT - 1) / UNIT * UNIT) continue;
    *pointer = *one;
    of.unused.erase(one);
    return true;
  }
  return false;
}

// A driver pins pages for as long as they are locked, and the kernel refuses that for a shared mapping of a file that it
// writes back to a disk.
bool on_disk(const char* pointer, size_t bytes) {
  constexpr unsigned long IN_MEMORY[] = {0x01021994, 0x858458f6, 0x958458f6};  // tmpfs, ramfs, hugetlbfs
  std::ifstream maps("/proc/self/maps");
  for (std::string line; std::getline(maps, line);) {
    std::istringstream words(line);
    unsigned long begin, end, inode;
    char dash;
    std::string rights, offset, device, path;
    words >> std::hex >> begin >> dash >> end >> rights >> offset >> device >> std::dec >> inode >> std::ws;
    std::getline(words, path);
    if (end <= (unsigned long)pointer || begin >= (unsigned long)pointer + bytes) continue;
    if (!inode || rights.back() != 's' || path.empty() || path[0] != '/') continue;
    struct statfs found;
    if (statfs(path.c_str(), &found)) continue;  // a file without a name: memfd_create, shared anonymous memory
    if (!std::count(std::begin(IN_MEMORY), std::end(IN_MEMORY), (unsigned long)found.f_type)) return true;
  }
  return false;
}

cudaError_t copy(void* to, const void* from, size_t bytes, cudaStream_t stream) {
  auto* lane = lane_of(stream);
  if (!bytes) return cudaSuccess;
  bool to_device = on_device(to), from_device = on_device(from);
  auto kind = to_device ? (from_device ? cudaMemcpyDeviceToDevice : cudaMemcpyHostToDevice) : cudaMemcpyDeviceToHost;
  lane->copied_bytes[kind] += bytes;
  bool pageable_to = !to_device && !on_pinned(to, bytes), pageable_from = !from_device && !on_pinned(from, bytes);
  if ((pageable_to || pageable_from) && lane->capture) {
    invalidate(*lane->capture);
    return cudaErrorStreamCaptureUnsupported;
  }
  if (pageable_to || pageable_from) count("pageable_copies");
  if (pageable_from) {  // read before the call returns
    auto read = std::make_shared<std::vector<char>>((char*)from, (char*)from + bytes);
    auto error = put(lane, {"copy from pageable memory", [=] { memcpy(behind(to), read->data(), bytes); }});
    if (error != cudaSuccess || !pageable_to) return error;
  } else {
    const char* host = to_device ? (from_device ? nullptr : (char*)from) : (char*)to;
    auto error = put(lane, {"copy", [=] { memmove(behind(to), behind(from), bytes); }, {}, host, bytes});
    if (error != cudaSuccess || !pageable_to) return error;
  }
  count("host_waits");  // the call returns when the bytes are there
  finish(lane, lane->issued);
  return cudaSuccess;
}
}  // namespace

int current_device() { return current; }
void set_current_device(int device) { current = device; }
size_t device_bytes(int device) { return arena(device).bytes; }
bool on_device(const void* pointer) { return device_of(pointer) >= 0; }
bool on_pinned(const void* pointer, size_t bytes) {
  auto found = pinned.upper_bound((const char*)pointer);
  if (found == pinned.begin()) return false;
  --found;
  return (const char*)pointer + bytes <= found->first + found->second;
}
// The release threshold of a default pool is 0: whoever waits for the device hands back what the pool does not use.
void release_unused(int device) {
  for (void* pointer : std::exchange(arenas[device].unused, {})) give_back(device, pointer);
}
char* behind(const void* pointer) {
  int device = device_of(pointer);
  return device < 0 ? (char*)pointer : arenas[device].behind + ((char*)pointer - arenas[device].seen);
}
}  // namespace late

using namespace late;

extern "C" {
uint64_t late_pinned_bytes() {
  std::lock_guard held(mutex);
  uint64_t sum = 0;
  for (auto& [_, bytes] : pinned) sum += bytes;
  return sum;
}
uint64_t late_device_bytes(int device) {
  std::lock_guard held(mutex);
  return arena(device).taken_bytes;
}
// Where the host finds what a device has at this address; for kernels.cpp and for tests.
void* late_behind(const void* pointer) {
  std::lock_guard held(mutex);
  return behind(pointer);
}

cudaError_t cudaMalloc(void** pointer, size_t bytes) {
  LATE_ENTER_UNSAFE("cudaMalloc");
  return say(take(current, pointer, bytes));
}
// Of the device's default pool: there from this point of the stream on, and full of what nobody wrote.
cudaError_t cudaMallocAsync(void** pointer, size_t bytes, cudaStream_t stream) {
  LATE_ENTER("cudaMallocAsync");
  auto* lane = lane_of(stream);
  if (lane->capture) return say(cudaErrorNotSupported);  // a graph's own memory is not played
  if (!take_unused(lane->device, pointer, bytes) && take(lane->device, pointer, bytes) != cudaSuccess) {
    release_unused(lane->device);
    if (auto error = take(lane->device, pointer, bytes)) return say(error);
  }
  return say(put(lane, {"allocate", [fresh = behind(*pointer), bytes] { memset(fresh, FRESH, bytes); }}));
}
// When the stream comes there the pool has it: for the device it is still in use, and cudaMalloc does not get it.
cudaError_t cudaFreeAsync(void* pointer, cudaStream_t stream) {
  LATE_ENTER("cudaFreeAsync");
  int device = device_of(pointer);
  if (device < 0) return say(cudaErrorInvalidValue);
  auto& of = arenas[device];
  bool is_unused = std::count(of.unused.begin(), of.unused.end(), pointer);
  if (is_unused || !of.taken.count((char*)pointer - of.seen)) return say(cudaErrorInvalidValue);
  return say(put(lane_of(stream), {"free", [=] { arenas[device].unused.push_back(pointer); }}));
}
cudaError_t cudaFree(void* pointer) {
  LATE_ENTER_UNSAFE("cudaFree");
  if (!pointer) return cudaSuccess;
  int device = device_of(pointer);
  if (device < 0) return say(cudaErrorInvalidValue);
  count("host_waits");  // it waits for its device
  finish_device(device);
  return say(give_back(device, pointer));
}
cudaError_t cudaMemGetInfo(size_t* free, size_t* total) {
  std::lock_guard held(mutex);
  auto& of = arena(current);
  *total = of.bytes;
  *free = of.bytes - of.taken_bytes;
  return cudaSuccess;
}
cudaError_t cudaHostAlloc(void** pointer, size_t bytes, unsigned) {
  LATE_ENTER_UNSAFE("cudaHostAlloc");
  size_t mapped = (bytes + PAGE - 1) / PAGE * PAGE;
  void* given = mmap(nullptr, mapped, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
  if (given == MAP_FAILED) return say(cudaErrorMemoryAllocation);
  memset(given, FRESH, mapped);
  pinned[(char*)given] = allocated[(char*)given] = mapped;
  count("locked_bytes", mapped);
  *pointer = given;
  return cudaSuccess;
}
cudaError_t cudaFreeHost(void* pointer) {
  LATE_ENTER_UNSAFE("cudaFreeHost");
  if (!pointer) return cudaSuccess;
  auto found = allocated.find((char*)pointer);
  if (found == allocated.end()) return say(cudaErrorInvalidValue);
  count("host_waits");
  finish_all();
  munmap(pointer, found->second);
  pinned.erase((char*)pointer);
  allocated.erase(found);
  return cudaSuccess;
}
cudaError_t cudaHostRegister(void* pointer, size_t bytes, unsigned) {
  LATE_ENTER_UNSAFE("cudaHostRegister");
  for (auto& [from, other] : pinned)
    if ((char*)pointer < from + other && from < (char*)pointer + bytes) return say(cudaErrorHostMemoryAlreadyRegistered);
  if (on_disk((char*)pointer, bytes)) return say(cudaErrorInvalidValue);
  pinned[(char*)pointer] = bytes;
  count("locked_bytes", bytes);
  return cudaSuccess;
}
cudaError_t cudaHostUnregister(void* pointer) {
  LATE_ENTER_UNSAFE("cudaHostUnregister");
  auto found = pinned.find((char*)pointer);
  if (found == pinned.end() || allocated.count((char*)pointer)) return say(cudaErrorHostMemoryNotRegistered);
  if (touched(found->first, found->second)) violate("memory is unregistered that queued work reads or writes");
  pinned.erase(found);
  return cudaSuccess;
}
cudaError_t cudaPointerGetAttributes(cudaPointerAttributes* attributes, const void* pointer) {
  std::lock_guard held(mutex);
  memset(attributes, 0, sizeof *attributes);
  int device = device_of(pointer);
  if (device >= 0) {
    attributes->type = cudaMemoryTypeDevice;
    attributes->device = device;
    attributes->devicePointer = (void*)pointer;
  } else if (on_pinned(pointer, 1)) {
    attributes->type = cudaMemoryTypeHost;
    attributes->hostPointer = attributes->devicePointer = (void*)pointer;
  } else {
    attributes->type = cudaMemoryTypeUnregistered;
    attributes->device = -2;
    attributes->hostPointer = (void*)pointer;
  }
  return cudaSuccess;
}
cudaError_t cudaMemcpyAsync(void* to, const void* from, size_t bytes, cudaMemcpyKind, cudaStream_t stream) {
  LATE_ENTER("cudaMemcpyAsync");
  return say(copy(to, from, bytes, stream));
}
cudaError_t cudaMemcpyPeerAsync(void* to, int, const void* from, int, size_t bytes, cudaStream_t stream) {
  LATE_ENTER("cudaMemcpyAsync");
  return say(copy(to, from, bytes, stream));
}
cudaError_t cudaMemcpy(void* to, const void* from, size_t bytes, cudaMemcpyKind) {
  LATE_ENTER_UNSAFE("cudaMemcpy");
  if (auto error = copy(to, from, bytes, nullptr)) return say(error);
  count("host_waits");
  finish(lane_of(nullptr), lane_of(nullptr)->issued);
  return cudaSuccess;
}
cudaError_t cudaMemsetAsync(void* to, int value, size_t bytes, cudaStream_t stream) {
  LATE_ENTER("cudaMemsetAsync");
  return say(put(lane_of(stream), {"memset", [=] { memset(behind(to), value, bytes); }}));
}
cudaError_t cudaMemset(void* to, int value, size_t bytes) { return cudaMemsetAsync(to, value, bytes, nullptr); }
}
