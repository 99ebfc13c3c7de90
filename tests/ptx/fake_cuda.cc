// The driver's functions that tools/gpu_probes uses, with their signatures, over the PTX machine.
#include <cstdint>
#include <cstdlib>
#include <cstring>

#include "ptx/client.hpp"

namespace {

using ptx_machine::Client;

constexpr int kInvalid = 1, kNoDevice = 100;
char context, module_, stamp;  // handles

void* memory(size_t bytes, int32_t rank) {
  void* const at = std::calloc(1, bytes + 128);
  auto* const aligned =
      reinterpret_cast<void*>((reinterpret_cast<uintptr_t>(at) + 127) / 128 * 128);
  Client::instance()->memory(aligned, static_cast<int64_t>(bytes), rank);
  return aligned;
}

}  // namespace

extern "C" {

int cuInit(unsigned flags) {
  return flags != 0 ? kInvalid : Client::instance() == nullptr ? kNoDevice : 0;
}
int cuGetErrorName(int error, const char** name) {
  *name = error == kNoDevice ? "CUDA_ERROR_NO_DEVICE" : "CUDA_ERROR_INVALID_VALUE";
  return 0;
}
int cuDevicePrimaryCtxRetain(void** out, int device) {
  *out = &context;
  return device == 0 ? 0 : kInvalid;
}
int cuCtxSetCurrent(void* own) { return own == &context ? 0 : kInvalid; }
int cuCtxSynchronize() { return 0; }
int cuDeviceGetAttribute(int* value, int attribute, int device) {
  *value = attribute == 75 ? 9 : attribute == 76 ? 0 : attribute == 16 ? 2 : 1 << 20;
  return device == 0 ? 0 : kInvalid;
}
int cuDeviceGetName(char* name, int length, int device) {
  std::strncpy(name, "a machine in software", static_cast<size_t>(length));
  return device == 0 ? 0 : kInvalid;
}
int cuDeviceGetCount(int* count) {
  *count = 1;
  return 0;
}
int cuDriverGetVersion(int* version) {
  *version = 13000;
  return 0;
}
int cuModuleLoadData(void** out, const void* image) {
  *out = &module_;
  return std::strstr(static_cast<const char*>(image), ".version") != nullptr ? 0 : kInvalid;
}
int cuModuleGetFunction(void** out, void* of, const char* name) {
  *out = strdup(name);
  return of == &module_ ? 0 : kInvalid;
}
int cuFuncSetAttribute(void*, int attribute, int value) {
  return attribute == 8 && value >= 0 && value <= 227 * 1024 ? 0 : kInvalid;
}
int cuMemAlloc_v2(uint64_t* out, size_t bytes) {
  *out = reinterpret_cast<uint64_t>(memory(bytes, 0));
  return 0;
}
int cuMemHostAlloc(void** out, size_t bytes, unsigned flags) {
  *out = memory(bytes, -1);
  return flags == 2 ? 0 : kInvalid;
}
int cuMemsetD8_v2(uint64_t at, unsigned char value, size_t bytes) {
  if (value != 0) std::memset(reinterpret_cast<void*>(at), value, bytes);
  return 0;
}
int cuMemcpyDtoH_v2(void* to, uint64_t from, size_t bytes) {
  std::memcpy(to, reinterpret_cast<const void*>(from), bytes);
  return 0;
}
int cuMemcpyDtoDAsync_v2(uint64_t to, uint64_t from, size_t bytes, void* stream) {
  const bool apart = to >= from + bytes || from >= to + bytes;
  return apart && bytes > 0 && stream == nullptr ? 0 : kInvalid;
}
int cuLaunchKernel(void* function, unsigned x, unsigned y, unsigned z, unsigned threads,
                   unsigned threads_y, unsigned threads_z, unsigned shared, void* stream,
                   void** args, void** extra) {
  if (y != 1 || z != 1 || threads_y != 1 || threads_z != 1 || stream != nullptr || extra != nullptr)
    return kInvalid;
  Client::instance()->run({static_cast<const char*>(function), x, 1, threads, shared, args, 0, 1});
  return 0;
}
int cuLaunchCooperativeKernel(void* function, unsigned x, unsigned y, unsigned z, unsigned threads,
                              unsigned threads_y, unsigned threads_z, unsigned shared, void* stream,
                              void** args) {
  return cuLaunchKernel(function, x, y, z, threads, threads_y, threads_z, shared, stream, args,
                        nullptr);
}
int cuEventCreate(void** out, unsigned flags) {
  *out = &stamp;
  return flags == 0 ? 0 : kInvalid;
}
int cuEventRecord(void* event, void* stream) {
  return event == &stamp && stream == nullptr ? 0 : kInvalid;
}
int cuEventSynchronize(void* event) { return event == &stamp ? 0 : kInvalid; }
int cuEventElapsedTime(float* milliseconds, void* begin, void* end) {
  *milliseconds = 2;
  return begin == &stamp && end == &stamp ? 0 : kInvalid;
}
}
