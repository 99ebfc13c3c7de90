// The driver's functions over the emulated device, as a library for the Python tests. Kernels are
// those of src/cuda themselves.
#include <algorithm>
#include <iterator>
#include <string>

#include "cuda/device/load_plan.cuh"
#include "cuda/device/notice.cuh"
#include "cuda/device/plan.cuh"
#include "cuda/device/plan_bank.cuh"
#include "cuda/device/reduce.cuh"
#include "cuda/device/replicate.cuh"
#include "cuda/device/reroute.cuh"
#include "cuda/device/reroute_map.cuh"
#include "cuda/device/reroute_shares.cuh"
#include "cuda/device/save.cuh"
#include "streams.hpp"

namespace {

using emulation::Event;
using emulation::Graph;
using emulation::Grid;
using emulation::kInvalid;
using emulation::kSuccess;
using emulation::Streams;
using emulation::Work;

template <class Args>
const Args& argument(void** arguments, int32_t i = 0) {
  return *static_cast<const Args*>(arguments[i]);
}

template <class Args, auto kKernel>
Work run(const char* name, void** arguments, const Grid& grid) {
  return [name, grid, args = argument<Args>(arguments)] {
    emulation::launch(name, args, grid, [&](std::byte* memory) { kKernel(args, memory); });
  };
}

Work notify(const char* name, void** arguments, const Grid& grid) {
  using uec::cuda::BlockCall;
  auto state = argument<uint64_t>(arguments);
  auto notice = argument<uec::cuda::Notice>(arguments, 1);
  return [=]() mutable {
    void* args[] = {&state, &notice};
    emulation::launch(name, args, grid, [&](std::byte* memory) {
      uec::cuda::notify<false>(*reinterpret_cast<uec::cuda::RankState*>(state), notice,
                               *reinterpret_cast<BlockCall*>(memory));
    });
  };
}

std::atomic<uint64_t> launches{0};  // also those that are captured

// A launch as an operation of a stream: the arguments are copied now.
struct Kernel {
  const char* name;
  Work (*launch)(const char* name, void** arguments, const Grid& grid);
  int32_t warps = 0;      // 0: as many as it is launched with, of the emulation's few lanes
  bool together = false;  // blocks of a launch wait for each other
};
const Kernel kKernels[] = {
    {"ultraep_replicate", run<uec::cuda::LaunchArgs, uec::cuda::replicate<false>>, 4, true},
    {"ultraep_replicate_notice", notify, 1},
    {"ultraep_reduce", run<uec::cuda::LaunchArgs, uec::cuda::reduce>, 0, true},
    {"ultraep_load", run<uec::cuda::LoadArgs, uec::cuda::load<false>>, 2},
    {"ultraep_load_plan", run<uec::cuda::LoadPlanArgs, uec::cuda::load_plan>},
    {"ultraep_plan", run<uec::cuda::PlanArgs, uec::cuda::plan>},
    {"ultraep_plan_in_bank", run<uec::cuda::BankPlanArgs, uec::cuda::plan_in_bank>},
    {"ultraep_reroute_shares", run<uec::cuda::SharesArgs, uec::cuda::reroute_shares>},
    {"ultraep_reroute_int32", run<uec::cuda::RerouteArgs, uec::cuda::reroute_ids<int32_t>>},
    {"ultraep_reroute_int64", run<uec::cuda::RerouteArgs, uec::cuda::reroute_ids<int64_t>>},
    {"ultraep_reroute_map", run<uec::cuda::RerouteArgs, uec::cuda::reroute_map>},
    {"ultraep_save_plan", run<uec::cuda::SaveArgs, uec::cuda::save_plan>},
};

constexpr int32_t kMultiprocessors = 16;

// In the shared memory of a multiprocessor of sm_90.
int32_t blocks_per_multiprocessor(size_t shared) {
  return static_cast<int32_t>((228u << 10) / (shared + 1024));
}

int32_t launch(void* kernel, unsigned blocks, unsigned ranks, unsigned threads, unsigned shared,
               bool together, void* stream, void** arguments) {
  const auto* const known = static_cast<const Kernel*>(kernel);
  if (known < std::begin(kKernels) || known >= std::end(kKernels)) return kInvalid;
  if (known->together != together) return kInvalid;
  const int32_t room = kMultiprocessors * blocks_per_multiprocessor(shared);
  if (together && static_cast<int32_t>(blocks * ranks) > room)
    return emulation::kCooperativeTooLarge;
  const auto num_threads = static_cast<int32_t>(threads);
  const bool on_ptx = ptx_machine::Client::instance() != nullptr;
  const Grid grid{
      .blocks = static_cast<int32_t>(blocks),
      .ranks = static_cast<int32_t>(ranks),
      .shared_bytes = known->warps == 1 ? int64_t{sizeof(uec::cuda::BlockCall)} : shared,
      .warps = on_ptx              ? num_threads / 32
               : known->warps == 0 ? num_threads / emulation::kLanes
                                   : known->warps};
  ++launches;
  Streams::instance().enqueue(stream, known->launch(known->name, arguments, grid));
  return kSuccess;
}

}  // namespace

extern "C" {

// ---- what a device gives a test -----------------------------------------------------------------

const void* emulated_kernel(const char* name) {
  for (const Kernel& kernel : kKernels)
    if (std::string(name) == kernel.name) return &kernel;
  return nullptr;
}

int32_t emulated_multiprocessors() { return kMultiprocessors; }

uint64_t emulated_launches() { return launches.load(); }

void emulated_synchronize() { Streams::instance().synchronize(); }
void emulated_synchronize_stream(void* stream) { Streams::instance().synchronize(stream); }

// Keeps a stream busy for that long.
void emulated_delay(void* stream, int64_t microseconds) {
  Streams::instance().enqueue(
      stream, [=] { std::this_thread::sleep_for(std::chrono::microseconds(microseconds)); });
}

// Copies in the order of a stream: as work of the caller's before and after a call.
void emulated_copy(void* to, const void* from, uint64_t bytes, void* stream) {
  Streams::instance().enqueue(stream, [=] { std::memcpy(to, from, bytes); });
}

void emulated_begin_capture(void* stream) { Streams::instance().begin_capture(stream); }
int32_t emulated_is_capturing(void* stream) { return Streams::instance().capture_of(stream) != 0; }
int32_t emulated_end_capture(void* stream, Graph** graph) {
  return Streams::instance().end_capture(stream, graph);
}
void emulated_replay(const Graph* graph, void* stream) {
  Streams::instance().replay(graph, stream);
}

// ---- the driver ---------------------------------------------------------------------------------

int32_t cuCtxPushCurrent(void*) { return kSuccess; }
int32_t cuCtxPopCurrent(void**) { return kSuccess; }

int32_t cuCtxSynchronize() {
  if (Streams::instance().spoil_captures()) return emulation::kCaptureUnsupported;
  Streams::instance().synchronize();
  return kSuccess;
}

int32_t cuMemcpyHtoD(uint64_t to, const void* from, size_t bytes) {
  if (Streams::instance().refuses()) return emulation::kCaptureUnsupported;
  Streams::instance().stage(reinterpret_cast<void*>(to), from, bytes);
  return kSuccess;
}

int32_t cuStreamSynchronize(void* stream) {
  if (Streams::instance().refuses()) return emulation::kCaptureUnsupported;
  if (stream != nullptr)
    Streams::instance().synchronize(stream);
  else
    Streams::instance().synchronize_legacy();
  return kSuccess;
}

int32_t cuMemsetD32Async(uint64_t to, unsigned value, size_t count, void* stream) {
  Streams::instance().enqueue(stream,
                              [=] { std::fill_n(reinterpret_cast<unsigned*>(to), count, value); });
  return kSuccess;
}

int32_t cuMemcpyHtoDAsync(uint64_t to, const void* from, size_t bytes, void* stream) {
  emulated_copy(reinterpret_cast<void*>(to), from, bytes, stream);
  return kSuccess;
}

// Word by word where it can: flags are read while kernels of peers write them.
int32_t cuMemcpyDtoHAsync(void* to, uint64_t from, size_t bytes, void* stream) {
  Streams::instance().enqueue(stream, [=] {
    const size_t words = from % sizeof(uint64_t) == 0 ? bytes / sizeof(uint64_t) : 0;
    for (size_t i = 0; i < words; ++i)
      static_cast<uint64_t*>(to)[i] =
          std::atomic_ref(reinterpret_cast<uint64_t*>(from)[i]).load(std::memory_order_acquire);
    const size_t copied = words * sizeof(uint64_t);
    std::memcpy(static_cast<char*>(to) + copied, reinterpret_cast<const char*>(from) + copied,
                bytes - copied);
  });
  return kSuccess;
}

int32_t cuEventCreate(void** event, unsigned) {
  *event = new Event;
  return kSuccess;
}

int32_t cuEventDestroy(void*) { return kSuccess; }  // streams may still refer to it

int32_t cuEventRecord(void* event, void* stream) {
  return Streams::instance().record(static_cast<Event*>(event), stream);
}

int32_t cuEventQuery(void* event) { return Streams::instance().query(static_cast<Event*>(event)); }

int32_t cuStreamWaitEvent(void* stream, void* event, unsigned) {
  return Streams::instance().wait(stream, static_cast<Event*>(event));
}

int32_t cuStreamWaitValue64(void* stream, uint64_t at, uint64_t value, unsigned) {
  Streams::instance().enqueue(stream, [=] {
    const std::atomic_ref word(*reinterpret_cast<uint64_t*>(at));
    while (static_cast<int64_t>(word.load(std::memory_order_acquire) - value) < 0)
      std::this_thread::yield();
  });
  return kSuccess;
}

int32_t cuStreamGetCaptureInfo(void* stream, int32_t* status, uint64_t* id, void**, const void**,
                               size_t*) {
  bool spoiled = false;
  *id = Streams::instance().capture_of(stream, &spoiled);
  *status = *id == 0 ? 0 : spoiled ? 2 : 1;
  return kSuccess;
}

int32_t cuThreadExchangeStreamCaptureMode(int32_t* mode) {
  std::swap(*mode, emulation::capture_mode);
  return kSuccess;
}

int32_t cuLaunchKernel(void* kernel, unsigned grid_x, unsigned grid_y, unsigned, unsigned block_x,
                       unsigned, unsigned, unsigned shared, void* stream, void** arguments,
                       void**) {
  return launch(kernel, grid_x, grid_y, block_x, shared, false, stream, arguments);
}

int32_t cuLaunchCooperativeKernel(void* kernel, unsigned grid_x, unsigned grid_y, unsigned,
                                  unsigned block_x, unsigned, unsigned, unsigned shared,
                                  void* stream, void** arguments) {
  return launch(kernel, grid_x, grid_y, block_x, shared, true, stream, arguments);
}

int32_t cuOccupancyMaxActiveBlocksPerMultiprocessor(int32_t* blocks, void*, int32_t,
                                                    size_t shared) {
  *blocks = blocks_per_multiprocessor(shared);
  return kSuccess;
}

int32_t cuGetErrorName(int32_t, const char** name) {
  *name = "CUDA_ERROR_OF_THE_EMULATION";
  return kSuccess;
}
int32_t cuGetErrorString(int32_t, const char** text) {
  *text = "the emulated device does not know this";
  return kSuccess;
}

}  // extern "C"
