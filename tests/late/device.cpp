// What a program asks a device about, and the kernels of torch: registered, and launched only where nothing else runs them.
#include "machine.h"

#include <cstdio>
#include <cstring>

using namespace late;

namespace {
std::map<const void*, std::string> kernels;
thread_local struct {
  dim3 grid, block;
  size_t shared_bytes;
  void* stream;
} configuration;

// kernels.cpp runs ATen's ops on the CPU, so that hardly any kernel is launched. Of those that are, only a spinning one
// can be played: it does nothing, later.
cudaError_t launch(const void* function, cudaStream_t stream) {
  LATE_ENTER("cudaLaunchKernel");
  auto* lane = lane_of(stream);
  if (lane->device != current_device()) return say(cudaErrorInvalidResourceHandle);
  auto found = kernels.find(function);
  std::string name = found == kernels.end() ? "?" : found->second;
  if (name.find("spin_kernel") != std::string::npos) return say(spin(lane));
  violate("a kernel that nobody plays was launched: " + name);
  fprintf(stderr, "late: a kernel that nobody plays was launched: %s\n", name.c_str());
  return say(cudaErrorNotSupported);
}
}  // namespace

extern "C" {
// Work of an op that kernels.cpp plays. `drop` releases `data`, once no queue and no graph names it any more.
cudaError_t late_launch(cudaStream_t stream, const char* name, void (*run)(void*), void (*drop)(void*), void* data) {
  std::shared_ptr<void> kept(data, drop);
  LATE_ENTER("cudaLaunchKernel");
  auto* lane = lane_of(stream);
  if (lane->device != current_device()) return say(cudaErrorInvalidResourceHandle);
  return say(put(lane, {name, [run, kept] { run(kept.get()); }}));
}

void** __cudaRegisterFatBinary(void*) {
  static void* handle[1];
  return handle;
}
void __cudaRegisterFatBinaryEnd(void**) {}
void __cudaUnregisterFatBinary(void**) {}
void __cudaRegisterFunction(void**, const char* function, char*, const char* name, int, void*, void*, void*, void*, int*) {
  kernels[function] = name;
}
void __cudaRegisterVar(void**, char*, char*, const char*, int, size_t, int, int) {}
char __cudaInitModule(void**) { return 1; }
unsigned __cudaPushCallConfiguration(dim3 grid, dim3 block, size_t shared_bytes, void* stream) {
  configuration = {grid, block, shared_bytes, stream};
  return 0;
}
cudaError_t __cudaPopCallConfiguration(dim3* grid, dim3* block, size_t* shared_bytes, void* stream) {
  *grid = configuration.grid;
  *block = configuration.block;
  *shared_bytes = configuration.shared_bytes;
  *(void**)stream = configuration.stream;
  return cudaSuccess;
}
cudaError_t __cudaGetKernel(cudaKernel_t* kernel, const void* function) {
  *kernel = (cudaKernel_t)function;
  return cudaSuccess;
}
cudaError_t __cudaLaunchKernel(cudaKernel_t kernel, dim3, dim3, void**, size_t, cudaStream_t stream) {
  return launch((const void*)kernel, stream);
}
cudaError_t cudaLaunchKernel(const void* function, dim3, dim3, void**, size_t, cudaStream_t stream) { return launch(function, stream); }
cudaError_t cudaLaunchKernelExC(const cudaLaunchConfig_t* config, const void* function, void**) { return launch(function, config->stream); }
cudaError_t cudaLaunchCooperativeKernel(const void* function, dim3, dim3, void**, size_t, cudaStream_t stream) {
  return launch(function, stream);
}
cudaError_t cudaFuncGetAttributes(cudaFuncAttributes* attributes, const void*) {
  memset(attributes, 0, sizeof *attributes);
  attributes->maxThreadsPerBlock = 1024;
  attributes->binaryVersion = attributes->ptxVersion = 90;
  return cudaSuccess;
}
cudaError_t cudaFuncSetAttribute(const void*, cudaFuncAttribute, int) { return cudaSuccess; }
cudaError_t cudaOccupancyMaxActiveBlocksPerMultiprocessor(int* blocks, const void*, int, size_t) {
  *blocks = 1;
  return cudaSuccess;
}
cudaError_t cudaOccupancyMaxActiveBlocksPerMultiprocessorWithFlags(int* blocks, const void*, int, size_t, unsigned) {
  *blocks = 1;
  return cudaSuccess;
}

cudaError_t cudaGetDeviceCount(int* number) {
  *number = devices;
  return cudaSuccess;
}
cudaError_t cudaGetDevice(int* device) {
  *device = current_device();
  return cudaSuccess;
}
cudaError_t cudaSetDevice(int device) {
  if (device < 0 || device >= devices) return say(cudaErrorInvalidDevice);
  set_current_device(device);
  return cudaSuccess;
}
cudaError_t cudaGetDeviceProperties(cudaDeviceProp* of, int device) {
  std::lock_guard held(mutex);
  memset(of, 0, sizeof *of);
  strcpy(of->name, "Late (no device)");
  of->totalGlobalMem = device_bytes(device);
  of->major = 9;
  of->multiProcessorCount = 4;
  of->warpSize = 32;
  of->maxThreadsPerBlock = 1024;
  of->maxThreadsPerMultiProcessor = 2048;
  of->sharedMemPerBlock = 48 << 10;
  of->regsPerBlock = 64 << 10;
  of->maxThreadsDim[0] = of->maxThreadsDim[1] = 1024;
  of->maxThreadsDim[2] = 64;
  of->maxGridSize[0] = 2147483647;
  of->maxGridSize[1] = of->maxGridSize[2] = 65535;
  of->l2CacheSize = 50 << 20;
  of->unifiedAddressing = of->canMapHostMemory = of->concurrentKernels = 1;
  of->asyncEngineCount = 3;
  of->memoryBusWidth = 5120;
  return cudaSuccess;
}
cudaError_t cudaDeviceGetAttribute(int* value, cudaDeviceAttr attribute, int) {
  switch (attribute) {
    case cudaDevAttrComputeCapabilityMajor: *value = 9; break;
    case cudaDevAttrMultiProcessorCount: *value = 4; break;
    case cudaDevAttrWarpSize: *value = 32; break;
    case cudaDevAttrMaxThreadsPerBlock: *value = 1024; break;
    case cudaDevAttrCanUseHostPointerForRegisteredMem: *value = 1; break;
    default: *value = 0;
  }
  return cudaSuccess;
}
cudaError_t cudaDeviceGetStreamPriorityRange(int* least, int* greatest) {
  *least = 0;
  *greatest = -5;
  return cudaSuccess;
}
cudaError_t cudaDeviceCanAccessPeer(int* can, int, int) {
  *can = 0;
  return cudaSuccess;
}
cudaError_t cudaDeviceEnablePeerAccess(int, unsigned) { return say(cudaErrorNotSupported); }
cudaError_t cudaDeviceGetPCIBusId(char* text, int bytes, int device) {
  snprintf(text, bytes, "0000:0%d:00.0", device);
  return cudaSuccess;
}
cudaError_t cudaDriverGetVersion(int* version) {
  *version = CUDART_VERSION;
  return cudaSuccess;
}
cudaError_t cudaRuntimeGetVersion(int* version) {
  *version = CUDART_VERSION;
  return cudaSuccess;
}
cudaError_t cudaProfilerStart() { return cudaSuccess; }
cudaError_t cudaProfilerStop() { return cudaSuccess; }
cudaError_t cudaGetDriverEntryPointByVersion(const char*, void** function, unsigned, unsigned long long,
                                             cudaDriverEntryPointQueryResult* result) {
  if (function) *function = nullptr;
  if (result) *result = cudaDriverEntryPointSymbolNotFound;
  return cudaSuccess;
}
}
