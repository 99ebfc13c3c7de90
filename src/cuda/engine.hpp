// The CUDA engine's host half: one rank of one group. The calling thread prepares, copies and
// launches a call; nothing waits for the device except where it says so.
#pragma once

#include <algorithm>
#include <atomic>
#include <cstdint>
#include <memory>
#include <mutex>
#include <string>
#include <utility>
#include <vector>

#include "core/plan/check.hpp"
#include "core/transfer/bank.hpp"
#include "core/transfer/prepare.hpp"
#include "cuda/device/tables.hpp"
#include "cuda/launcher.hpp"
#include "engine/banks.hpp"
#include "engine/cause.hpp"
#include "engine/config.hpp"
#include "engine/health.hpp"

namespace uec::cuda {

// How a rank reaches the others, beyond EngineConfig::bases (0: no load/store access).
struct PeerConfig {
  std::vector<uint8_t> far;  // [G] 1: by puts and signals; empty: none is
  std::vector<int32_t> pes;  // [G] NVSHMEM's numbers; empty: not needed
  Address staging = 0;       // symmetric, staging_bytes(), if any rank is far
};

// A call whose plan is on the device. Exactly one of `main_ptrs` and `table` is set.
struct DeviceReplicateArgs {
  Address slot_expert = 0;              // [G][S], int32
  Address slot_quota = 0;               // [G][S], or 0
  Address home_quota = 0;               // [E], or 0
  Address home = 0;                     // [E], compared with the group's; 0: known to be equal
  uint64_t tag = 0;                     // as in ReplicateArgs
  const uint64_t* main_ptrs = nullptr;  // [segments][M] addresses, copied now
  Address table = 0;                    // the same in device memory, read when the kernel runs
  uint32_t segments = 0;                // bits
  int32_t mode = -1;                    // a Mode, or -1: by cost
  int32_t region = -1;                  // pull: which region the main weights lie in
  int32_t bank = -1;                    // whose slots are filled; -1: none, and so all slots
  uint64_t version = 0;                 // of the main weights, for a bank
  const int32_t* known = nullptr;       // for a bank: slot_expert, if the host knows it too
};

// The arguments of a reduction whose plan is on the device.
struct DeviceReduceArgs {
  Address slot_expert = 0;
  Address slot_quota = 0;
  Address home_quota = 0;
  Address home = 0;
  uint64_t tag = 0;
  const uint64_t* main_ptrs =
      nullptr;  // [grad segments][M] addresses of main gradients, copied now
  Address table = 0;
  uint32_t main_types = 0;  // bit i: the GradType of main gradients of segment i
  int32_t mode = -1;        // kPull, kDirect, or -1: by cost
  bool zero = true;         // slot gradients are cleared
  int32_t bank = -1;        // the plan's; -1: none
  Address in_use = 0;       // the mark of a saved plan, as SaveArgs has it, or 0
};

class Engine {
 public:
  static int64_t staging_bytes(int32_t num_sms, int64_t tile_bytes);

  Engine(EngineConfig config, const PeerConfig& peers, std::shared_ptr<Launcher> launcher);
  ~Engine();
  Engine(const Engine&) = delete;
  Engine& operator=(const Engine&) = delete;

  const Topology& topology() const { return topology_; }

  // Main weights that all ranks can address, in the order of their collective making: `offset`
  // [segments] of the first main, on all ranks, from `bases` [G]. `table` is device memory for
  // both.
  int32_t add_region(const std::vector<uint64_t>& bases, const std::vector<int64_t>& offset,
                     Address table);

  PlanCheck check(const int32_t* slot_expert) const {
    return check_plan(SingleThread{}, topology_, slot_expert);
  }

  // Returns the call's epoch. Blocks only while kDepth calls are in flight.
  uint64_t replicate(const ReplicateArgs& args, bool background, Handle stream,
                     const Interrupted& interrupted, Mode* mode);

  // Replicates a plan that is on the device, which the kernel checks. On a stream that is being
  // captured the number has the mark kCaptured, and the weights have to be in a table.
  uint64_t replicate_on_device(const DeviceReplicateArgs& args, bool background, Handle stream,
                               const Interrupted& interrupted);

  // Adds the slots' gradients to the main ones. Otherwise as the two above.
  uint64_t reduce(const ReduceArgs& args, bool background, Handle stream,
                  const Interrupted& interrupted, Mode* mode);
  uint64_t reduce_on_device(const DeviceReduceArgs& args, bool background, Handle stream,
                            const Interrupted& interrupted);

  // What the slots of a bank hold [G][S], after all submitted calls; nothing once the group has
  // failed. Unless the host knows the plans of all, this waits for them, and for `stream`, which
  // has to come after the replays of graphs.
  std::vector<int32_t> residents(int32_t bank, Handle stream, const Interrupted& interrupted);
  // The bank's BankTable on the device, as it is from here on in `stream`.
  Address bank_table(int32_t bank, Handle stream, const Interrupted& interrupted);
  uint64_t version(int32_t bank) const;
  // The main weights have changed, by what `stream` holds: the bank's next call is of the next
  // version. On the stream, after the calls that were submitted for the bank; can be captured.
  void invalidate(int32_t bank, Handle stream, const Interrupted& interrupted);

  // Counts ids on the device and exchanges the counts. Captured calls as above. With `plan`, the
  // address of a PlanOutput, it also plans them, in the same launch.
  uint64_t gather(const LoadCall& load, Address plan, const PlanArgs& plan_args, Handle stream,
                  const Interrupted& interrupted);
  // The position and value of the first id that made this rank's device reject its load; -1: none.
  std::pair<int64_t, int64_t> bad_id() const;

  // This rank's input was bad: takes an epoch, notifies the peers and poisons the group. Blocks.
  void reject();
  // Aborts the calls in flight, here and at the peers. Blocks until the device has ended them.
  void abort();
  // Says goodbye. Returns a rank that is known to have made a different last call, else -1.
  int32_t close();

  // Makes `stream` wait for the call; blocks only until all ranks of a shared launch have called.
  // False: the call is known to have failed.
  bool wait(uint64_t epoch, Handle stream, const Interrupted& interrupted);
  // Waits for some slots of this rank that the call fills or finds filled.
  bool wait_slots(uint64_t epoch, const std::vector<int32_t>& slots, Handle stream,
                  const Interrupted& interrupted);
  // [S] words in device memory, as in ready.cuh.
  Address ready(int32_t bank) const;
  // Blocks until the call has finished. True: it has succeeded.
  bool synchronize(uint64_t epoch, const Interrupted& interrupted);
  bool is_completed(uint64_t epoch);

  uint64_t failed_epoch() const;  // 0: none is known
  // The first failure that is known; epoch 0: none. After one on the device this waits, for a
  // bounded time, for what the other ranks say of it.
  Report report() const;
  // [G] what had been published when that was known; empty: nothing is known.
  PeerStates peer_states() const;
  uint64_t epoch() const { return submitted_.load(); }
  int64_t bytes_stored() const;                            // by finished calls
  CallCounts calls() const { return calls_made_.read(); }  // not those that were captured

 private:
  // Submits the next call, as `fill(number)` says, if there can be one. Under submit_mutex_.
  template <class Fill>
  uint64_t submit(Fill&& fill, Handle stream, const Interrupted& interrupted);
  // Submits a plan on the host: `prepare(call)` fills the call, and returns what it adds to the
  // digest; `main_ptrs` are `num_local_experts` addresses.
  template <class Prepare>
  uint64_t submit_from_host(Operation operation, uint64_t tag, Prepare&& prepare,
                            const uint64_t* main_ptrs, int64_t num_local_experts, int32_t region,
                            bool background, Handle stream, const Interrupted& interrupted,
                            Mode* mode);
  // Submits a plan on the device; the addresses are in `main_ptrs` if the request has no table of
  // them.
  uint64_t submit_from_device(Request request, const char* missing, const uint64_t* main_ptrs,
                              int64_t num_local_experts, Handle stream,
                              const Interrupted& interrupted);
  uint64_t submit_captured(uint64_t capture, const Request& request, Handle stream);
  // Under submit_mutex_: from here on in `stream`, the bank is empty and of this version.
  void set_version(int32_t bank, uint64_t version, Handle stream, const Interrupted& interrupted);
  Address on_device(const void* own) const;            // where that, in memory_, is on the device
  CaptureError refusal(const std::string& why) const;  // of a call that is being captured
  uint64_t capture_in(Handle stream) const;            // as capture_of()
  bool await_launch(uint64_t epoch, const Interrupted& interrupted);
  bool succeeded(uint64_t epoch) const;
  PeerStates read_peer_states(const Report& own) const;
  bool has_ended() const;          // takes no more calls
  void fail_here();                // the driver refused a call
  int64_t num_addresses() const {  // of main weights
    return int64_t{capacity_.num_segments} * capacity_.num_local_experts;
  }
  int64_t num_grad_addresses() const {  // of main gradients
    return int64_t{capacity_.num_grad_segments} * capacity_.num_local_experts;
  }
  Status& status() const { return launcher_->status(config_.rank); }
  void write_state();

  EngineConfig config_;
  PeerConfig peers_;
  std::shared_ptr<Launcher> launcher_;
  EngineLayout layout_;
  Topology topology_;
  GroupTables tables_;
  Capacity capacity_;
  std::vector<uint64_t> memory_;  // of what follows
  Tables own_tables_;             // as on the device
  BankTables own_banks_;          // at first
  PrepareArrays arrays_;
  PlanShape shape_;
  struct Region {
    std::vector<uint64_t> words;  // as take_region() has them
    Address table;                // of these
  };
  std::vector<Region> regions_;

  // Under submit_mutex_: `call` fills slots of the bank (-1: none, which is as bank 0).
  void note_call(int32_t bank, uint64_t segments, const int32_t* slot_expert, uint64_t call,
                 uint64_t capture);
  // Under submit_mutex_: lets `stream` follow the calls that read and write the bank's table.
  // Replays of other captures are ordered by the caller.
  bool follow_calls(int32_t bank, uint64_t capture, Handle stream, const Interrupted& interrupted);
  Banks banks_;                             // under submit_mutex_
  int32_t bank_of_[Launcher::kDepth] = {};  // of the latest calls, by number; likewise

  mutable std::mutex submit_mutex_;
  CallCounter calls_made_;
  std::atomic<uint64_t> submitted_{0};
  std::atomic<uint64_t> failed_{0};  // by the host's own finding; 0: none
  std::atomic<bool> closed_{false};
  mutable std::mutex report_mutex_;
  // Under report_mutex_: of a failure on the device, once its root is known.
  mutable Report report_;
  mutable PeerStates states_at_failure_;
};

}  // namespace uec::cuda
