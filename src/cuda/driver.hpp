// The CUDA driver as the host half uses it: function pointers that the caller has looked up.
//
// Nothing is linked and no CUDA header is needed. Python passes the addresses that the driver gives
// for these names (their versions of CUDA 12.0), or those of an emulation.
#pragma once

#include <cstddef>
#include <cstdint>
#include <stdexcept>
#include <string>

namespace uec::cuda {

// What the driver calls CUresult, CUcontext, CUstream, CUevent and CUdeviceptr.
using Result = int32_t;
using Handle = void*;
using Address = uint64_t;

inline constexpr Result kSuccess = 0;
inline constexpr Result kNotReady = 600;
inline constexpr Result kCaptureImplicit = 906;

// Name and type of each function, in the driver's own words.
#define UEC_DRIVER_FUNCTIONS(F)                                                                   \
  F(cuCtxPushCurrent, (Handle context))                                                           \
  F(cuCtxPopCurrent, (Handle * context))                                                          \
  F(cuCtxSynchronize, ())                                                                         \
  F(cuStreamSynchronize, (Handle stream))                                                         \
  F(cuMemcpyHtoD, (Address to, const void* from, size_t bytes))                                   \
  F(cuMemcpyHtoDAsync, (Address to, const void* from, size_t bytes, Handle stream))               \
  F(cuMemcpyDtoHAsync, (void* to, Address from, size_t bytes, Handle stream))                     \
  F(cuMemsetD32Async, (Address to, unsigned value, size_t count, Handle stream))                  \
  F(cuEventCreate, (Handle * event, unsigned flags))                                              \
  F(cuEventDestroy, (Handle event))                                                               \
  F(cuEventRecord, (Handle event, Handle stream))                                                 \
  F(cuEventQuery, (Handle event))                                                                 \
  F(cuStreamWaitEvent, (Handle stream, Handle event, unsigned flags))                             \
  F(cuStreamWaitValue64, (Handle stream, Address at, uint64_t value, unsigned flags))             \
  F(cuStreamGetCaptureInfo, (Handle stream, int32_t* status, uint64_t* id, void** graph,          \
                             const void** nodes, size_t* num_nodes))                              \
  F(cuThreadExchangeStreamCaptureMode, (int32_t* mode))                                           \
  F(cuLaunchKernel, (Handle kernel, unsigned grid_x, unsigned grid_y, unsigned grid_z,            \
                     unsigned block_x, unsigned block_y, unsigned block_z, unsigned shared_bytes, \
                     Handle stream, void** arguments, void** unused))                             \
  F(cuLaunchCooperativeKernel,                                                                    \
    (Handle kernel, unsigned grid_x, unsigned grid_y, unsigned grid_z, unsigned block_x,          \
     unsigned block_y, unsigned block_z, unsigned shared_bytes, Handle stream, void** arguments)) \
  F(cuOccupancyMaxActiveBlocksPerMultiprocessor,                                                  \
    (int32_t* blocks, Handle kernel, int32_t threads, size_t shared_bytes))                       \
  F(cuGetErrorName, (Result result, const char** name))                                           \
  F(cuGetErrorString, (Result result, const char** text))

struct Driver {
#define UEC_MEMBER(name, arguments) Result(*name) arguments = nullptr;
  UEC_DRIVER_FUNCTIONS(UEC_MEMBER)
#undef UEC_MEMBER
};

// What calls have submitted to streams so far, for measurements; captured calls count once.
struct LaunchCounts {
  uint64_t kernels = 0;
  uint64_t copies = 0;  // to the device
};

// A driver call failed.
class DriverError : public std::runtime_error {
 public:
  using std::runtime_error::runtime_error;
};

// The call cannot be captured into a CUDA graph.
class CaptureError : public std::runtime_error {
 public:
  using std::runtime_error::runtime_error;
};

inline void require(const Driver& driver, Result result, const char* what) {
  if (result == kSuccess) return;
  const char *name = nullptr, *text = nullptr;
  driver.cuGetErrorName(result, &name);
  driver.cuGetErrorString(result, &text);
  throw DriverError(std::string(what) + " failed with " + (name ? name : "an unknown error") +
                    " (" + std::to_string(result) + "): " + (text ? text : "no description"));
}

// Copies bytes to the device, where they are when this returns. Outside of captures.
inline void copy_to_device(const Driver& driver, Address to, const void* from, size_t bytes) {
  require(driver, driver.cuMemcpyHtoD(to, from, bytes), "cuMemcpyHtoD");
  // From memory that is not page-locked, the driver returns once it has read it. The rest is in the
  // legacy stream, which other streams do not wait for. This does not wait for the whole context,
  // whose kernels may be waiting for calls that peers have yet to make.
  require(driver, driver.cuStreamSynchronize(nullptr), "cuStreamSynchronize");
}

// Which capture into a graph a stream is in; 0: none.
inline uint64_t capture_of(const Driver& driver, Handle stream) {
  constexpr int32_t kActive = 1, kInvalidated = 2;
  int32_t status = 0;
  uint64_t id = 0;
  const Result result =
      driver.cuStreamGetCaptureInfo(stream, &status, &id, nullptr, nullptr, nullptr);
  if (result == kCaptureImplicit)
    throw CaptureError(
        "the call is on the legacy default stream, while a stream that waits for that one is being"
        " captured; make the call on a stream of its own");
  require(driver, result, "cuStreamGetCaptureInfo");
  if (status == kInvalidated)
    throw CaptureError(
        "the stream's capture into a CUDA graph is invalid, because of an operation before this "
        "call"
        " that cannot be captured");
  return status == kActive ? id : 0;
}

// Lets this thread query events, for a scope, while any thread captures into a graph: else the
// driver refuses, and the capture is invalidated. Events recorded in a capture are still refused.
class RelaxedScope {
 public:
  explicit RelaxedScope(const Driver& driver) : driver_(driver) { exchange(); }
  ~RelaxedScope() { exchange(); }
  RelaxedScope(const RelaxedScope&) = delete;
  RelaxedScope& operator=(const RelaxedScope&) = delete;

 private:
  void exchange() { driver_.cuThreadExchangeStreamCaptureMode(&mode_); }

  const Driver& driver_;
  int32_t mode_ = 2;  // CU_STREAM_CAPTURE_MODE_RELAXED; inside the scope: what the thread's was
};

// Copies bytes from the device, after what `stream` holds, which is in no capture. Not by the
// legacy stream: that would also wait for kernels of other groups.
inline void copy_from_device(const Driver& driver, void* to, Address from, size_t bytes,
                             Handle stream) {
  const RelaxedScope relaxed(driver);
  require(driver, driver.cuMemcpyDtoHAsync(to, from, bytes, stream), "cuMemcpyDtoHAsync");
  require(driver, driver.cuStreamSynchronize(stream), "cuStreamSynchronize");
}

// Whether the device has reached an event; DriverError: it has failed.
inline bool has_completed(const Driver& driver, Handle event) {
  const RelaxedScope relaxed(driver);
  const Result result = driver.cuEventQuery(event);
  if (result != kNotReady) require(driver, result, "a kernel");
  return result == kSuccess;
}

// Makes a context current on this thread, for a scope. A null context is left alone.
class ContextScope {
 public:
  ContextScope(const Driver& driver, Handle context) : driver_(driver), context_(context) {
    if (context_) require(driver_, driver_.cuCtxPushCurrent(context_), "cuCtxPushCurrent");
  }
  ~ContextScope() {
    Handle popped = nullptr;
    if (context_) driver_.cuCtxPopCurrent(&popped);
  }
  ContextScope(const ContextScope&) = delete;
  ContextScope& operator=(const ContextScope&) = delete;

 private:
  const Driver& driver_;
  Handle context_;
};

}  // namespace uec::cuda
