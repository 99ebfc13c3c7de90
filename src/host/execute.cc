// Running calls: the steps of the core in threads, bounded waits, and what a failure does.
#include <poll.h>

#include <algorithm>
#include <chrono>

#include "core/transfer/gather.hpp"
#include "core/transfer/reducer.hpp"
#include "core/transfer/worker.hpp"
#include "engine/cause.hpp"
#include "host/adder.hpp"
#include "host/backoff.hpp"
#include "host/engine.hpp"

namespace uec::host {
namespace {

using Clock = std::chrono::steady_clock;

double seconds_since(Clock::time_point start) {
  return std::chrono::duration<double>(Clock::now() - start).count();
}

// How long a damaged slot's home is given to say whether its main weights have changed.
constexpr double kVerdictSeconds = 5;

CheckedCall checked_call(const Prepared& prepared) {
  return {prepared.call.epoch.number,
          prepared.slot_expert.data(),
          prepared.resident.empty() ? nullptr : prepared.resident.data(),
          prepared.call.addresses.slot_offset,
          prepared.arrays.main_ptrs,
          &prepared.selected};
}

}  // namespace

// ---- executing ---------------------------------------------------------------------------------

void Engine::run_next(const std::function<bool()>& interrupted) {
  const std::lock_guard running(run_mutex_);
  const uint64_t epoch = completed_.load() + 1;
  if (epoch > submitted_.load() || failed_.load() != 0) return;
  if (!execute(*calls_[epoch % kDepth], interrupted)) {
    publish_failure();
    return;
  }
  const Clock::duration now = Clock::now().time_since_epoch();
  finished_at_[epoch % kKeptFinishTimes].store(
      std::chrono::duration_cast<std::chrono::nanoseconds>(now).count());
  {
    const std::lock_guard lock(submit_mutex_);
    completed_.store(epoch);
  }
  finished_.notify_all();
}

bool Engine::execute(Prepared& prepared, const std::function<bool()>& interrupted) {
  const Call& call = prepared.call;
  Report early = check_peers(memory_, call.layout, call.epoch, last_record_);
  if (early.fault == Fault::kNone && cancelled_.load()) early.fault = Fault::kCancelled;
  if (early.fault != Fault::kNone) {
    report_fault(call, early);
    return false;
  }
  const bool checked = slot_check_ != nullptr && prepared.operation == Operation::kReplicate;
  if (checked) slot_check_->remember(checked_call(prepared));
  HostMover mover;
  announce_call(call, memory_, mover);
  announce_open(call, memory_, mover);
  last_record_ = call.epoch.record;
  own_record_.store(last_record_.word, std::memory_order_relaxed);

  if (prepared.operation == Operation::kGather) {
    Gather steps(call, memory_, mover, prepared.row, topology_.num_experts,
                 prepared.scratch(0).open);
    const bool done = drive(steps, prepared, interrupted);
    while (!done && steps.drain_step() != Step::kFinished) {
    }
    const uint8_t* table = config_.bases[config_.rank] + call.layout.load(0, 0);
    const int64_t entries = int64_t{topology_.num_ranks} * topology_.num_experts;
    if (done) std::copy_n(reinterpret_cast<const int32_t*>(table), entries, prepared.table);
    return done;
  }

  if (call.work.num_pieces + call.work.num_reductions > 0) {
    worker_failed_.store(false);
    if (config_.num_workers > 1) {
      shared_ = &prepared;
      helpers_busy_.store(static_cast<uint32_t>(config_.num_workers - 1));
      generation_.fetch_add(1);
      generation_.notify_all();
    }
    const bool moved = work(prepared, 0, interrupted);
    for (uint32_t busy; (busy = helpers_busy_.load()) != 0;) helpers_busy_.wait(busy);
    if (!moved || worker_failed_.load()) return false;
  }
  Finish<HostMemory> finish(call, memory_);
  if (checked) return drive(finish, prepared, interrupted) && check_slots(prepared, interrupted);
  return drive(finish, prepared, interrupted);
}

// The transfer has ended well. Damage that is found nevertheless makes the call fail, as this
// rank's own finding.
bool Engine::check_slots(Prepared& prepared, const std::function<bool()>& interrupted) {
  const CheckedCall checked = checked_call(prepared);
  AwaitCopies homes(*slot_check_, checked, prepared.call, memory_);
  if (!drive(homes, prepared, interrupted)) return false;
  Damage damage = slot_check_->find_changed_main(checked);
  slot_check_->publish_verdict(checked, damage.kind != Damage::kNone);
  if (damage.kind == Damage::kNone) damage = slot_check_->find_damaged_slot(checked);
  if (damage.kind == Damage::kNone) {
    slot_check_->publish_checked(checked);
    AwaitChecks readers(*slot_check_, checked, prepared.call, memory_);
    return drive(readers, prepared, interrupted);
  }
  // The home may be to blame: it says so as soon as its own part of the transfer has ended.
  const auto start = Clock::now();
  while (damage.kind == Damage::kSlot && seconds_since(start) < kVerdictSeconds &&
         !slot_check_->has_verdict(checked, damage.home, &damage.source_changed)) {
    poll_peers();
    if (memory_.peer_gone(damage.home) || cancelled_.load()) break;
    std::this_thread::sleep_for(std::chrono::milliseconds(1));
  }
  {
    const std::lock_guard lock(submit_mutex_);
    damage_ = damage;
  }
  Report report;
  report.fault = Fault::kDamaged;
  report.wait.peer = config_.rank;
  report_fault(prepared.call, report);
  return false;
}

bool Engine::work(Prepared& prepared, int32_t worker_idx,
                  const std::function<bool()>& interrupted) {
  return prepared.operation == Operation::kReduce ? add(prepared, worker_idx, interrupted)
                                                  : move(prepared, worker_idx, interrupted);
}

bool Engine::move(Prepared& prepared, int32_t worker_idx,
                  const std::function<bool()>& interrupted) {
  HostMover mover;
  Worker<HostMemory, HostMover> worker(prepared.call, memory_, mover, prepared.scratch(worker_idx),
                                       {worker_idx, config_.num_workers});
  const bool done = drive(worker, prepared, interrupted);
  while (!done && worker.drain_step() != Step::kFinished) {
  }
  bytes_stored_.fetch_add(mover.bytes_stored());
  return done;
}

bool Engine::add(Prepared& prepared, int32_t worker_idx, const std::function<bool()>& interrupted) {
  HostAdder adder;
  UnpublishedGroup held[kMaxUnpublished];
  Reducer<HostMemory, HostAdder> reducer(prepared.call, memory_, adder,
                                         prepared.scratch(worker_idx), held,
                                         {worker_idx, config_.num_workers});
  const bool done = drive(reducer, prepared, interrupted);
  while (!done && reducer.drain_step() != Step::kFinished) {
  }
  bytes_stored_.fetch_add(adder.bytes_stored());
  return done;
}

// Runs steps to their end. Every wait is bounded: by the peer's death, an abort, a cancellation,
// or the clock.
template <class Steps>
bool Engine::drive(Steps&& steps, Prepared& prepared, const std::function<bool()>& interrupted) {
  Backoff backoff(Doorbell(config_.bases[config_.rank] + layout_.symmetric.doorbell));
  WaitMeter meter(waits_);
  bool waiting = false, called = false;
  Clock::time_point since{}, called_since{};
  Report report;
  for (;;) {
    const Step step = steps.step();
    if (waiting && step != Step::kWaitsForPeer) meter.count(Clock::now(), report.wait);
    if (step == Step::kFinished) return true;
    if (step == Step::kFailed) {
      report = report_step(memory_, prepared.call, steps.fault(), steps.wait());
      break;
    }
    if (step != Step::kWaitsForPeer) {
      if (worker_failed_.load(std::memory_order_relaxed)) return false;
      backoff.reset();
      waiting = false;
      continue;
    }
    if (!backoff.pause()) continue;
    // Once per sleep, or every few thousand polls.
    if (!waiting) {
      waiting = true;
      since = backoff.began();
      meter.begin(since);
    }
    if (worker_failed_.load()) return false;
    poll_peers();
    report = report_step(memory_, prepared.call, Fault::kNone, steps.wait());
    meter.count(Clock::now(), report.wait);
    if (report.fault == Fault::kAborted) break;
    if (cancelled_.load() || (interrupted && interrupted())) {
      report.fault = Fault::kCancelled;
      break;
    }
    if (!called && all_called(memory_, prepared.call)) {
      called = true;
      called_since = Clock::now();
    }
    const double limit = called ? config_.wait_timeout : config_.call_timeout;
    const double waited = seconds_since(called ? std::max(since, called_since) : since);
    if (limit > 0 && waited > limit) {
      report.fault = Fault::kTimeout;
      report.seconds = waited;
      report.all_called = called;
      break;
    }
  }
  backoff.reset();
  report_fault(prepared.call, report);
  return false;
}

// A peer's pipe reaches end-of-file when its process ends, however it ends, unless a child that
// it has forked holds the pipe too; then the process descriptor shows it.
void Engine::poll_peers() {
  const auto is_at_end = [](const std::vector<int>& fds, size_t r, short events) {
    if (r >= fds.size() || fds[r] < 0) return false;
    pollfd peer{fds[r], events, 0};
    return poll(&peer, 1, 0) > 0 && (peer.revents & (events | POLLHUP | POLLERR)) != 0;
  };
  for (size_t r = 0; r < config_.domain.size(); ++r) {
    if (gone_[r].load()) continue;
    if (is_at_end(config_.peer_pipes, r, 0) || is_at_end(config_.peer_processes, r, POLLIN))
      gone_[r].store(true, std::memory_order_release);
  }
}

// Only this rank's own memory is read, which stays when its peers end.
PeerStates Engine::read_peer_states() const {
  PeerStates states(topology_.num_ranks);
  for (int32_t r = 0; r < topology_.num_ranks; ++r)
    states[r] = {{memory_.observe(layout_.symmetric.call(r))},
                 {memory_.observe(layout_.symmetric.abort(r))},
                 memory_.peer_gone(r),
                 config_.bases[r] != nullptr};
  states[config_.rank].record.word = own_record_.load();
  return states;
}

// ---- failing -----------------------------------------------------------------------------------

// The first fault of a group: notifies the peers at once and keeps the report. The abort is in
// every live peer's memory before the call returns. Other workers of the call stop at their next
// step.
void Engine::report_fault(const Call& call, Report report) {
  worker_failed_.store(true);
  const std::lock_guard once(fault_mutex_);
  if (faulted_) return;
  faulted_ = true;
  HostMover mover;
  report.epoch = call.epoch.number;
  announce_abort(call, memory_, mover, abort_word(call.rank, report));
  while (!memory_.flags_delivered()) {
  }
  PeerStates states = await_root(call.rank, &report, [&] {
    poll_peers();
    return read_peer_states();
  });
  const std::lock_guard lock(submit_mutex_);
  states_at_failure_ = std::move(states);
  report_ = report;
}

// Ends the failed call and all after it. Only once its workers have drained: from here on the
// caller may change or free what the call was reading.
void Engine::publish_failure() {
  {
    const std::lock_guard lock(submit_mutex_);
    failed_.store(report_.epoch);
  }
  finished_.notify_all();
}

// ---- threads -----------------------------------------------------------------------------------

void Engine::background_loop() {
  for (;;) {
    {
      std::unique_lock lock(submit_mutex_);
      queued_.wait(lock, [&] {
        return stop_background_ ||
               (background_until_.load() > completed_.load() && failed_.load() == 0);
      });
      if (stop_background_) return;
    }
    run_next({});
  }
}

void Engine::helper_loop(int32_t worker) {
  for (uint32_t seen = 0;;) {
    generation_.wait(seen);
    seen = generation_.load();
    if (stop_helpers_.load()) return;
    work(*shared_, worker, {});
    if (helpers_busy_.fetch_sub(1) == 1) helpers_busy_.notify_all();
  }
}

}  // namespace uec::host
