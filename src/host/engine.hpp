// The host engine: executes calls of one rank of one group with threads over shared memory.
#pragma once

#include <array>
#include <atomic>
#include <condition_variable>
#include <cstdint>
#include <functional>
#include <memory>
#include <mutex>
#include <thread>
#include <vector>

#include "core/plan/check.hpp"
#include "core/transfer/failure.hpp"
#include "core/transfer/layout.hpp"
#include "core/transfer/protocol.hpp"
#include "engine/banks.hpp"
#include "engine/cause.hpp"
#include "engine/config.hpp"
#include "engine/health.hpp"
#include "engine/process.hpp"
#include "host/policies.hpp"
#include "host/prepared.hpp"
#include "host/slot_check.hpp"

namespace uec::host {

class Engine {
 public:
  explicit Engine(EngineConfig config);
  ~Engine();
  Engine(const Engine&) = delete;
  Engine& operator=(const Engine&) = delete;

  const EngineLayout& layout() const { return layout_; }
  const Topology& topology() const { return topology_; }

  // Main weights that all ranks can address: as many on each rank, or in memory of their own.
  struct Region {
    std::vector<const uint8_t*> bases;  // [G]
    std::vector<int64_t> offset;        // [segments] of the first main from there, on all ranks
  };
  // Must be called in the order in which the ranks make regions together.
  int32_t add_region(Region region);

  PlanCheck check(const int32_t* slot_expert) const {
    return check_plan(SingleThread{}, topology_, slot_expert);
  }

  // Each returns the call's epoch, which wait() takes. With `background`, the engine's own thread
  // runs the call; else the caller's, inside wait(). With kDepth calls in flight they wait for the
  // first, as wait() does.
  uint64_t replicate(const ReplicateArgs& args, bool background, Mode* mode,
                     const std::function<bool()>& interrupted = {});
  uint64_t reduce(const ReduceArgs& args, bool background, Mode* mode,
                  const std::function<bool()>& interrupted = {});
  uint64_t gather(const int32_t* row, int32_t* table, bool background,
                  const std::function<bool()>& interrupted = {});

  // What the slots of a bank hold [G][S], as all submitted calls leave it; nothing once the group
  // has failed. The next two concern this rank alone: calls of ranks that differ do not match.
  std::vector<int32_t> residents(int32_t bank) const;
  uint64_t version(int32_t bank) const;
  // The main weights have changed: the bank's next call is of the next version.
  void invalidate(int32_t bank);
  // The last call that was submitted for a bank; 0: none.
  uint64_t last_call(int32_t bank) const;
  // [G][S] the slots that the last call writes to or, of a reduction, reads.
  std::vector<uint8_t> slots_to_fill() const;

  // This rank's input was bad: takes an epoch, notifies the peers and poisons the group.
  void reject(const std::function<bool()>& interrupted = {});
  void abort();
  // Says goodbye. Returns a rank that is known to have made a different last call, else -1.
  int32_t close();
  // This process was forked from the engine's: it has none of the threads, and mutexes may stay
  // locked forever. Only the counters below may be read; destroying the engine notifies no peer.
  bool is_inherited() const { return threads_.is_inherited(); }

  bool is_completed(uint64_t epoch) const;
  // True: the call has succeeded. False: it failed, and report() says how. `interrupted`, polled
  // now and then on the calling thread, ends the wait (and the call, if it runs on this thread).
  bool wait(uint64_t epoch, const std::function<bool()>& interrupted = {});
  // Whether all that a call brings to this rank's slot is there, so that the slot may be read while
  // the call goes on: at once where it brings nothing. False once the call has failed.
  bool slot_ready(uint64_t epoch, int32_t slot) const;
  // Waits for that of some slots, of a call in the background. Returns as wait() does.
  bool wait_slots(uint64_t epoch, const std::vector<int32_t>& slots,
                  const std::function<bool()>& interrupted = {});
  Report report() const;

  uint64_t failed_epoch() const { return failed_.load(); }  // 0: none
  uint64_t epoch() const { return submitted_.load(); }
  // When a call finished, in nanoseconds of the steady clock. 0: it has not, or it failed, or a
  // later call has taken its place.
  int64_t finished_at(uint64_t epoch) const;
  int64_t bytes_stored() const { return bytes_stored_.load(); }

  // Monitoring: none of these waits for a call, and all work after a failure and a close.
  uint64_t completed() const { return completed_.load(); }
  CallCounts calls() const { return calls_made_.read(); }
  Waits waits() const { return waits_.read(); }
  // [G] what each rank last published: at the time of the failure, or now if there was none.
  PeerStates peer_states() const;
  // What is wrong, for a call that failed with kDamaged.
  Damage damage() const;

 private:
  struct Threads {
    std::condition_variable queued, finished;
    std::thread background;
    std::vector<std::thread> helpers;  // workers beyond the first
  };

  static constexpr uint64_t kDepth = 4;  // submitted calls that have not finished
  // How many past calls' finish times are kept: a caller that asks at each submission misses none.
  static constexpr uint64_t kKeptFinishTimes = 2 * kDepth;

  template <class Steps>
  bool drive(Steps&& steps, Prepared& prepared, const std::function<bool()>& interrupted);
  void stop_threads();
  Prepared* begin_call(Operation operation, const std::function<bool()>& interrupted,
                       std::unique_lock<std::mutex>& lock);
  uint64_t enter_call(Prepared& prepared, uint64_t digest, bool background,
                      std::unique_lock<std::mutex>& lock);
  void run_next(const std::function<bool()>& interrupted);
  bool execute(Prepared& prepared, const std::function<bool()>& interrupted);
  bool work(Prepared& prepared, int32_t worker, const std::function<bool()>& interrupted);
  bool move(Prepared& prepared, int32_t worker, const std::function<bool()>& interrupted);
  bool add(Prepared& prepared, int32_t worker, const std::function<bool()>& interrupted);
  bool check_slots(Prepared& prepared, const std::function<bool()>& interrupted);
  Call bare_call(uint64_t epoch, CallRecord record) const;
  void cancel();
  void report_fault(const Call& call, Report report);
  void publish_failure();
  void poll_peers();
  PeerStates read_peer_states() const;
  void background_loop();
  void helper_loop(int32_t worker);

  EngineConfig config_;
  EngineLayout layout_;
  Topology topology_;
  GroupTables tables_;
  std::vector<Region> regions_;
  std::vector<std::unique_ptr<Prepared>> calls_;
  std::unique_ptr<std::atomic<bool>[]> gone_;  // [G]
  HostMemory memory_;
  std::unique_ptr<SlotCheck> slot_check_;  // null: slots are not checked
  Banks banks_;                            // under submit_mutex_
  uint64_t digest_;
  CallRecord last_record_;
  std::atomic<uint64_t> own_record_{0};  // what this rank has published; for monitoring
  CallCounter calls_made_;
  WaitLog waits_;

  mutable std::mutex submit_mutex_;  // order of calls, and the report
  std::mutex run_mutex_;             // who executes
  OwnedByProcess<Threads> threads_;
  // Two, so that a call that runs on the caller's thread does not wake the background thread.
  std::condition_variable &queued_ = threads_->queued, &finished_ = threads_->finished;
  std::atomic<uint64_t> submitted_{0}, completed_{0}, background_until_{0};
  std::array<std::atomic<int64_t>, kKeptFinishTimes>
      finished_at_{};                // of a call: before completed_
  std::atomic<uint64_t> failed_{0};  // first epoch that failed; 0: none
  std::atomic<bool> cancelled_{false};
  bool closed_ = false;
  Report report_;
  Damage damage_;                 // under submit_mutex_
  PeerStates states_at_failure_;  // under submit_mutex_
  std::atomic<int64_t> bytes_stored_{0};

  // Workers beyond the first help with each call that moves bytes.
  Prepared* shared_ = nullptr;
  std::atomic<uint32_t> generation_{0}, helpers_busy_{0};
  std::atomic<bool> stop_helpers_{false}, worker_failed_{false};
  bool stop_background_ = false;  // under submit_mutex_
  std::mutex fault_mutex_;
  bool faulted_ = false;  // under fault_mutex_
};

}  // namespace uec::host
