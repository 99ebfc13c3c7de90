// A driver that does nothing but record its calls, copy bytes, and let the test say when events
// complete. "Device" memory is host memory.
#pragma once

#include <algorithm>
#include <cstring>
#include <functional>
#include <mutex>
#include <set>
#include <string>
#include <utility>
#include <vector>

#include "cuda/device/args.hpp"
#include "cuda/driver.hpp"
#include "support/check.hpp"

namespace recorder {

using uec::cuda::Address;
using uec::cuda::Driver;
using uec::cuda::Handle;
using uec::cuda::Result;

inline const Handle kOwnStream = reinterpret_cast<Handle>(0x51);
inline const Handle kCapturedStream = reinterpret_cast<Handle>(0x52);
inline const Handle kKernel = reinterpret_cast<Handle>(0xA1);
inline const Handle kReduce = reinterpret_cast<Handle>(0xA5);
inline const Handle kNotice = reinterpret_cast<Handle>(0xA2);
inline const Handle kLoad = reinterpret_cast<Handle>(0xA3);
inline const Handle kLoadPlan = reinterpret_cast<Handle>(0xA4);

struct Launch {
  Handle kernel = nullptr, stream = nullptr;
  unsigned grid[3] = {}, block[3] = {}, shared_bytes = 0;
  bool together = false;       // a cooperative launch
  uec::cuda::LaunchArgs args;  // of the replicate or the reduce kernel
  uec::cuda::LoadArgs load;    // of the load kernel
  Address states = 0;          // of the notice kernel
  int64_t notice = -1;
  const void* arguments = nullptr;  // the first of any kernel, while on_launch() runs
};

struct State {
  std::mutex mutex;
  std::vector<std::string> log;
  std::vector<Launch> launches;
  std::set<Handle> pending;  // events that were recorded and have not completed
  bool complete = true;      // events complete as they are recorded
  int32_t capturing = 0;
  uint64_t capture = 9;
  Result capture_result = 0;
  Result launch_result = 0;
  Result read_result = 0;  // of copies from the device
  std::function<int32_t(Handle kernel, int32_t threads, size_t shared)> occupancy;
  int32_t mode = 0;          // of the thread, for captures
  int contexts = 0;          // pushed and not popped
  int events = 0;            // that exist
  std::vector<char> staged;  // of the last copy to the device
  void* staged_to = nullptr;
  std::function<void(const Launch&)> on_launch;
};

inline State& state() {
  static State s;
  return s;
}

inline std::string name_of(Handle handle) {
  return std::to_string(reinterpret_cast<uintptr_t>(handle));
}
inline void note(const std::string& text) { state().log.push_back(text); }

inline std::vector<std::string> take_log() {
  const std::lock_guard lock(state().mutex);
  return std::exchange(state().log, {});
}
inline void complete_all() {
  const std::lock_guard lock(state().mutex);
  state().pending.clear();
}
inline size_t num_launches() {
  const std::lock_guard lock(state().mutex);
  return state().launches.size();
}

// A copy from pageable memory is complete once the legacy stream has been waited for.
inline void deliver_staged() {
  State& s = state();
  if (!s.staged.empty()) std::memcpy(s.staged_to, s.staged.data(), s.staged.size());
  s.staged.clear();
}

inline Result launch(Handle kernel, const unsigned (&grid)[3], const unsigned (&block)[3],
                     unsigned shared, bool together, Handle stream, void** arguments) {
  if (state().launch_result != 0) return state().launch_result;
  Launch launch;
  launch.kernel = kernel;
  launch.stream = stream;
  std::copy_n(grid, 3, launch.grid);
  std::copy_n(block, 3, launch.block);
  launch.shared_bytes = shared;
  launch.together = together;
  launch.arguments = arguments[0];
  if (kernel == kNotice) {
    launch.states = *static_cast<Address*>(arguments[0]);
    launch.notice = *static_cast<int64_t*>(arguments[1]);
  } else if (kernel == kLoad) {
    launch.load = *static_cast<uec::cuda::LoadArgs*>(arguments[0]);
  } else if (kernel == kKernel || kernel == kReduce) {
    launch.args = *static_cast<uec::cuda::LaunchArgs*>(arguments[0]);
  }
  {
    const std::lock_guard lock(state().mutex);
    state().launches.push_back(launch);
    note((kernel == kNotice ? "notice on " : "launch on ") + name_of(stream));
  }
  if (state().on_launch) state().on_launch(launch);
  return 0;
}

// The function as one of the driver's, which threads may call at once; it succeeds.
template <auto kFunction, class... Args>
Result locked(Args... args) {
  const std::lock_guard lock(state().mutex);
  kFunction(args...);
  return uec::cuda::kSuccess;
}

inline Driver make_driver() {
  Driver d;
  d.cuCtxPushCurrent = locked<[](Handle) { ++state().contexts; }>;
  d.cuCtxPopCurrent = locked<[](Handle*) { --state().contexts; }>;
  d.cuCtxSynchronize = locked<[] { note("synchronize"); }>;
  d.cuStreamSynchronize = locked<[](Handle stream) {
    if (stream == nullptr) deliver_staged();
  }>;
  d.cuMemcpyHtoD = locked<[](Address to, const void* from, size_t bytes) {
    deliver_staged();
    const auto* const begin = static_cast<const char*>(from);
    state().staged.assign(begin, begin + bytes);
    state().staged_to = reinterpret_cast<void*>(to);
  }>;
  d.cuMemcpyHtoDAsync = locked<[](Address to, const void* from, size_t bytes, Handle stream) {
    std::memcpy(reinterpret_cast<void*>(to), from, bytes);
    note("copy " + std::to_string(bytes) + " on " + name_of(stream));
  }>;
  d.cuMemcpyDtoHAsync = [](void* to, Address from, size_t bytes, Handle) {
    if (state().read_result != 0) return state().read_result;
    std::memcpy(to, reinterpret_cast<const void*>(from), bytes);
    return Result{0};
  };
  d.cuMemsetD32Async = locked<[](Address to, unsigned value, size_t count, Handle stream) {
    std::fill_n(reinterpret_cast<unsigned*>(to), count, value);
    note("set " + std::to_string(count) + " on " + name_of(stream));
  }>;
  d.cuEventCreate = locked<[](Handle* event, unsigned) {
    static uintptr_t last = 1000;
    *event = reinterpret_cast<Handle>(++last);
    ++state().events;
  }>;
  d.cuEventDestroy = locked<[](Handle) { --state().events; }>;
  d.cuEventRecord = locked<[](Handle event, Handle stream) {
    if (!state().complete) state().pending.insert(event);
    note("record " + name_of(event) + " on " + name_of(stream));
  }>;
  d.cuThreadExchangeStreamCaptureMode =
      locked<[](int32_t* mode) { std::swap(*mode, state().mode); }>;
  d.cuEventQuery = [](Handle event) {
    const std::lock_guard lock(state().mutex);
    if (state().capturing != 0 && state().mode != 2) return uec::cuda::Result{900};
    return state().pending.count(event) ? uec::cuda::kNotReady : uec::cuda::kSuccess;
  };
  d.cuStreamWaitEvent = locked<[](Handle stream, Handle event, unsigned) {
    note("wait for " + name_of(event) + " on " + name_of(stream));
  }>;
  d.cuStreamWaitValue64 = locked<[](Handle stream, Address at, uint64_t value, unsigned) {
    note("wait for " + std::to_string(value) + " at " + std::to_string(at) + " on " +
         name_of(stream));
  }>;
  d.cuStreamGetCaptureInfo = [](Handle, int32_t* status, uint64_t* id, void**, const void**,
                                size_t*) {
    *status = state().capturing;
    *id = state().capture;
    return state().capture_result;
  };
  d.cuLaunchKernel = [](Handle kernel, unsigned gx, unsigned gy, unsigned gz, unsigned bx,
                        unsigned by, unsigned bz, unsigned shared, Handle stream, void** arguments,
                        void**) {
    return launch(kernel, {gx, gy, gz}, {bx, by, bz}, shared, false, stream, arguments);
  };
  d.cuLaunchCooperativeKernel = [](Handle kernel, unsigned gx, unsigned gy, unsigned gz,
                                   unsigned bx, unsigned by, unsigned bz, unsigned shared,
                                   Handle stream, void** arguments) {
    return launch(kernel, {gx, gy, gz}, {bx, by, bz}, shared, true, stream, arguments);
  };
  d.cuOccupancyMaxActiveBlocksPerMultiprocessor = [](int32_t* blocks, Handle kernel,
                                                     int32_t threads, size_t shared) {
    *blocks = state().occupancy(kernel, threads, shared);
    return 0;
  };
  d.cuGetErrorName = locked<[](Result, const char** name) { *name = "CUDA_ERROR_OF_THE_TEST"; }>;
  d.cuGetErrorString = locked<[](Result, const char** text) { *text = "as the test wants it"; }>;
  return d;
}

}  // namespace recorder
