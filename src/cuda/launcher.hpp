// Launching calls: one launch for each call of the ranks that share it. A rank of an NVSHMEM group
// has a launcher to itself; the ranks of a loopback group share one, and the last of them to submit
// its n-th call launches the n-th kernel for all.
//
// Order on the device: a launch comes after what each rank's stream held when the rank submitted,
// and after the launch before it. A ring entry (a block in page-locked host memory, its copy on the
// device, and events) is used again only after the event that follows its last kernel.
//
// A call on a stream that is being captured becomes part of the graph. It is ordered within its
// capture alone; replays and other calls are ordered by the streams that they are given, which is
// up to the caller. Captured calls are numbered separately, each capture from where the last one
// ended, and share one block of device memory, because they run one after another.
#pragma once

#include <condition_variable>
#include <cstdint>
#include <functional>
#include <memory>
#include <mutex>
#include <vector>

#include "core/transfer/failure.hpp"
#include "core/transfer/prepare.hpp"
#include "cuda/device/args.hpp"
#include "cuda/driver.hpp"
#include "engine/process.hpp"

namespace uec::cuda {

// Polled now and then by waits on the calling thread; true ends them.
using Interrupted = std::function<bool()>;

// Marks the numbers of captured calls.
inline constexpr uint64_t kCaptured = uint64_t{1} << 62;

// What a rank submits: a replication, a reduction or, if there is a destination for it, a load.
struct Request {
  Operation operation = Operation::kReplicate;  // of what is not a load
  uint64_t tag = 0;   // of the plan's handle, the same for all ranks of a launch
  int32_t bank = -1;  // of a plan on the device, likewise
  DeviceCall device;  // of a plan on the device; else the host has filled the call's block
  // With a plan on the device: addresses of main weights, or of their gradients, in the block.
  int64_t main_ptrs_bytes = 0;
  LoadCall load;
  // For a load: where its plan goes, a PlanOutput, and what it is made of; 0: no plan is wanted.
  Address plan = 0;
  PlanArgs plan_args;
  // Runs on the group's own stream, next to the caller's work, with fewer blocks. Ranks may differ.
  bool background = false;

  // Whether one launch can serve both.
  bool can_launch_with(const Request& other) const;
};

// Memory is the caller's: zeroed, and kept until the launcher is gone.
struct LauncherConfig {
  Driver driver;
  Handle context = nullptr;
  Handle stream = nullptr;  // the group's own
  // The stream of captured calls: a stream in a capture takes no other calls until that has ended.
  Handle captured_stream = nullptr;
  Handle kernel = nullptr;  // ultraep_replicate[_far]
  Handle reduce = nullptr;  // ultraep_reduce; null: slots hold no gradients
  Handle notice = nullptr;  // ultraep_replicate_notice
  Handle load = nullptr;    // ultraep_load[_far]
  // ultraep_load_plan; null: the group is too large for it, or has far peers.
  Handle load_plan = nullptr;
  int32_t plan_warps = 0;  // of a block that plans
  int32_t warp_size = 32;
  int32_t first_rank = 0;  // of the ranks that share the launches
  int32_t num_ranks = 1;
  int32_t num_sms = 1;         // blocks of a rank
  int32_t background_sms = 1;  // the same in a background call
  int64_t tile_bytes = 0;
  int64_t max_shared_bytes = 0;  // of a block, of this device
  Capacity capacity;             // with the most local experts of any rank
  Address device = 0;            // device_bytes()
  uint8_t* pinned = nullptr;     // pinned_bytes(): page-locked, at the same address on the device
  double call_timeout = 0;       // seconds that a rank waits for the others to submit; 0: no limit
};

class Launcher {
 public:
  static constexpr uint64_t kDepth = 4;  // submitted calls that have not finished

  static int64_t device_bytes(const LauncherConfig& config);
  static int64_t pinned_bytes(const LauncherConfig& config);
  // Blocks of a transfer, or of a reduction, that a multiprocessor holds: the smaller number.
  static int32_t blocks_per_multiprocessor(const LauncherConfig& config);

  explicit Launcher(const LauncherConfig& config);
  ~Launcher();
  // A process forked from the one that made this has no device, and leaves it alone.
  bool is_inherited() const { return launches_.is_inherited(); }
  Launcher(const Launcher&) = delete;
  Launcher& operator=(const Launcher&) = delete;

  const LauncherConfig& config() const { return config_; }
  ContextScope scope() const { return {config_.driver, config_.context}; }

  Address state(int32_t rank) const;   // of its RankState
  Address tables(int32_t rank) const;  // of its tables and banks, which Engine lays out
  Status& status(int32_t rank) const;
  std::byte* block(int32_t rank, uint64_t call) const;  // the host's
  Address device_block(int32_t rank, uint64_t call) const;
  static int64_t tables_bytes(const Capacity& capacity);  // without the banks'
  static int64_t banks_bytes(const Capacity& capacity);   // behind them

  // Waits until the storage of `call` is free. False: the launcher has ended, or `interrupted`.
  bool await_storage(int32_t rank, uint64_t call, const Interrupted& interrupted);
  // Submits the rank's next call; the last rank to submit launches it. On `stream` itself if the
  // launcher has one rank and the call is not a background one; else on the group's own stream.
  // Called inside scope().
  void submit(int32_t rank, uint64_t call, const Request& request, Handle stream);
  // Submits on a stream that is in `capture`. Returns the call's number.
  uint64_t submit_captured(int32_t rank, uint64_t capture, const Request& request, Handle stream);
  // Waits until `call` is launched, which takes all ranks. False as above.
  bool await_launch(int32_t rank, uint64_t call, const Interrupted& interrupted);
  bool launched(uint64_t call) const;
  // Waits until a launched call has finished. False: interrupted.
  bool await_done(uint64_t call, const Interrupted& interrupted);
  bool done(uint64_t call);
  // Waits for what is queued in a stream. False: interrupted.
  bool await_stream(Handle stream, const Interrupted& interrupted);
  // Makes `stream` wait for a launched call.
  void order(uint64_t call, Handle stream);
  // Makes `stream` wait until only the kernel of a launched call is left to begin, if that is on
  // another stream. Inside scope().
  void order_behind_start(uint64_t call, Handle stream);
  // Waits until replays of captured calls have finished, if there can be any.
  void await_replays();
  // Publishes a notice to the peers, after all launches and replays so far, and waits until that is
  // done.
  void notify(int32_t rank, Notice notice);

  // Calls not launched yet never will be, because of `rank`; with `owing`, only those that the rank
  // has not submitted. The first reason stays. Returns the first such call.
  uint64_t end(int32_t rank, Fault fault, bool owing);
  // The report with which `rank` fails because of that, if it has submitted `call`; else epoch 0.
  Report ended(int32_t rank, uint64_t call) const;

  // Counts for all ranks of this launcher together, without notices.
  LaunchCounts counts() const {
    const std::lock_guard lock(mutex_);
    return counts_;
  }

 private:
  struct Entry {
    Handle done = nullptr;          // event
    std::vector<Handle> before;     // [ranks] events; then the first is the one before the kernel
    std::vector<Handle> stream;     // [ranks] where the rank called
    std::vector<Request> requests;  // [ranks]
    bool in_place = false;          // launched on the caller's stream itself
    uint64_t call = 0;              // that it was launched for
    uint64_t capture = 0;           // that this was in; 0: none
  };
  // Calls that are launched one after another.
  struct Line {
    std::vector<Entry> entries;       // [kDepth]
    std::vector<uint64_t> submitted;  // [ranks]
    uint64_t launched = 0;
    Handle last = nullptr;  // event after the last kernel; null: none
    Entry& entry(uint64_t number) { return entries[number % kDepth]; }
    const Entry& entry(uint64_t number) const { return entries[number % kDepth]; }
  };
  // Where a launcher's device memory holds what, in bytes; its start is the ranks' states.
  struct DeviceLayout {
    explicit DeviceLayout(const LauncherConfig& config);
    int64_t rank_tables, call_block;  // sizes
    int64_t tables, blocks, total;    // offsets
  };
  // A kernel whose blocks all have to be resident at the same time.
  struct BlockShape {
    Handle kernel;
    int32_t num_blocks, num_threads;  // of a rank, of a block
    int64_t shared_bytes;
  };
  struct Shapes {
    BlockShape replicate, reduce;
  };
  struct End {
    int32_t rank = -1;  // -1: not ended
    uint64_t from = 0;  // first call that is not launched
    Report report;      // of that rank
  };

  static bool is_captured(uint64_t call) { return (call & kCaptured) != 0; }
  static uint64_t number(uint64_t call) { return call & ~kCaptured; }
  Line& line(uint64_t call) { return is_captured(call) ? captured_ : line_; }
  const Line& line(uint64_t call) const { return is_captured(call) ? captured_ : line_; }
  static Shapes shapes(const LauncherConfig& config, int32_t num_blocks);
  Line make_line() const;
  void destroy(const Line& line) const;
  void enter(int32_t rank, uint64_t call, const Request& request, Handle stream);
  void launch(uint64_t call, Handle stream);
  void launch_transfer(const Entry& entry, uint64_t call, Handle stream);
  void launch_load(const Entry& entry, uint64_t call, Handle stream);
  void launch_kernel(Handle kernel, int32_t num_blocks, int32_t num_threads, int64_t shared_bytes,
                     void* args, Handle stream);
  void launch_together(const BlockShape& shape, void* args, Handle stream);
  bool agree(const Entry& entry, uint64_t call);
  void copy_blocks(const Entry& entry, uint64_t call, Handle stream);
  void join(const Line& line, Handle stream);
  Handle make_event() const;
  // Under mutex_:
  bool is_ended(uint64_t call) const {
    return end_.rank >= 0 && (is_captured(call) || call >= end_.from);
  }
  void end_calls_from(int32_t rank, uint64_t from, const Report& report);
  void poll_failures();

  LauncherConfig config_;
  const DeviceLayout layout_;
  const Shapes shapes_, background_;
  Handle notice_event_ = nullptr;  // event after a notice

  mutable std::mutex mutex_;
  OwnedByProcess<std::condition_variable> launches_;
  Line line_, captured_;
  uint64_t capture_ = 0;          // that the last captured call was in
  uint64_t captured_before_ = 0;  // number of the last captured call that was not in it
  LaunchCounts counts_;
  uint64_t completed_ = 0;
  End end_;
};

}  // namespace uec::cuda
