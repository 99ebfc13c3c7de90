// Running calls: the steps of the core in threads, bounded waits, and what a failure does.
#include <poll.h>

#include <algorithm>
#include <chrono>

#include "core/gather.hpp"
#include "host/backoff.hpp"
#include "host/engine.hpp"

namespace uec::host {
namespace {

using Clock = std::chrono::steady_clock;

double seconds_since(Clock::time_point start) {
  return std::chrono::duration<double>(Clock::now() - start).count();
}

}  // namespace

// ---- executing ---------------------------------------------------------------------------------

void Engine::run_next(const std::function<bool()>& interrupted) {
  const std::lock_guard running(run_mutex_);
  const uint64_t epoch = completed_.load() + 1;
  if (epoch > submitted_.load() || failed_.load() != 0) return;
  if (!execute(*calls_[epoch % kDepth], interrupted)) {
    settle_failure();
    return;
  }
  {
    const std::lock_guard lock(submit_mutex_);
    completed_.store(epoch);
  }
  finished_.notify_all();
}

bool Engine::execute(Prepared& prepared, const std::function<bool()>& interrupted) {
  const Call& call = prepared.call;
  Report early;
  if (cancelled_.load()) early.fault = Fault::kCancelled;
  if (const int32_t aborter = find_abort(memory_, call.layout, call.epoch); aborter >= 0) {
    early.fault = Fault::kAborted;
    early.aborter = aborter;
  } else if (const int32_t peer = disagreeing_peer(); peer >= 0) {
    early.fault = Fault::kMismatch;
    early.wait = {FlagKind::kCall, peer, -1, -1, call.epoch.number - 1, call.epoch.number - 1};
  }
  if (early.fault != Fault::kNone) {
    report_fault(call, early);
    return false;
  }
  HostMover mover;
  announce(call, memory_, mover);
  last_record_ = call.epoch.record.word;

  if (prepared.operation == Operation::kGather) {
    Gather steps(call, memory_, mover, prepared.row, topology_.num_experts, prepared.sent.data());
    const bool done = drive(steps, prepared, interrupted);
    const uint8_t* table = config_.bases[config_.rank] + call.layout.load(0, 0);
    const int64_t entries = int64_t{topology_.num_ranks} * topology_.num_experts;
    if (done) std::copy_n(reinterpret_cast<const int32_t*>(table), entries, prepared.table);
    return done;
  }

  if (call.work.num_pieces > 0) {
    worker_failed_.store(false);
    if (!helpers_.empty()) {
      shared_ = &prepared;
      helpers_busy_.store(static_cast<uint32_t>(helpers_.size()));
      shift_.fetch_add(1);
      shift_.notify_all();
    }
    const bool moved = work(prepared, 0, interrupted);
    for (uint32_t busy; (busy = helpers_busy_.load()) != 0;) helpers_busy_.wait(busy);
    if (!moved || worker_failed_.load()) return false;
  }
  Finish<HostMemory> finish(call, memory_);
  return drive(finish, prepared, interrupted);
}

namespace {

// Fetch and store in turn: a worker is blocked only when neither can do anything.
struct StreamSteps {
  Worker<HostMemory, HostMover>& worker;

  Step step() {
    const Step fetched = worker.fetch_step(), stored = worker.store_step();
    if (fetched == Step::kFailed || stored == Step::kFailed) return Step::kFailed;
    if (fetched == Step::kFinished && stored == Step::kFinished) return Step::kFinished;
    if (fetched == Step::kBlocked && stored == Step::kFinished) return Step::kBlocked;
    return Step::kProgress;
  }
  Fault fault() const { return worker.fault(); }
  const Wait& wait() const { return worker.wait(); }
};

}  // namespace

bool Engine::work(Prepared& prepared, int32_t worker_idx,
                  const std::function<bool()>& interrupted) {
  HostMover mover;
  const size_t scratch = prepared.pieces.size() * worker_idx;
  Worker<HostMemory, HostMover> worker(prepared.call, memory_, mover,
                                       prepared.live.data() + scratch,
                                       prepared.gate.data() + scratch);
  static_assert(Worker<HostMemory, HostMover>::kStages <= HostMover::kMaxStages);
  StreamSteps steps{worker};
  const bool done = drive(steps, prepared, interrupted);
  bytes_stored_.fetch_add(mover.bytes_stored());
  return done;
}

// Runs steps to their end. Every wait is bounded: by the peer's death, an abort, a cancellation,
// or the clock.
template <class Steps>
bool Engine::drive(Steps&& steps, Prepared& prepared, const std::function<bool()>& interrupted) {
  Backoff backoff(Doorbell(config_.bases[config_.rank] + layout_.symmetric.doorbell));
  bool waiting = false, called = false;
  Clock::time_point since{}, called_since{};
  Report report;
  for (;;) {
    const Step step = steps.step();
    if (step == Step::kFinished) return true;
    if (step == Step::kFailed) {
      report.fault = steps.fault();
      report.wait = steps.wait();
      if (report.fault == Fault::kAborted) report.aborter = report.wait.peer;
      // A peer that failed first and then ended has said why it is gone.
      const int32_t aborter = find_abort(memory_, layout_.symmetric, prepared.call.epoch);
      if (report.fault == Fault::kGone && aborter >= 0) {
        report.fault = Fault::kAborted;
        report.aborter = aborter;
      }
      break;
    }
    if (step != Step::kBlocked) {
      if (worker_failed_.load(std::memory_order_relaxed)) return false;
      backoff.reset();
      waiting = false;
      continue;
    }
    if (!backoff.pause()) continue;
    // Once per sleep, or every few thousand polls.
    if (!waiting) {
      waiting = true;
      since = Clock::now();
    }
    if (worker_failed_.load()) return false;
    poll_peers();
    if (const int32_t aborter = find_abort(memory_, layout_.symmetric, prepared.call.epoch);
        aborter >= 0) {
      report.fault = Fault::kAborted;
      report.wait = steps.wait();
      report.aborter = aborter;
      break;
    }
    if (cancelled_.load() || (interrupted && interrupted())) {
      report.fault = Fault::kCancelled;
      report.wait = steps.wait();
      break;
    }
    if (!called && all_called(prepared)) {
      called = true;
      called_since = Clock::now();
    }
    const double limit = called ? config_.wait_timeout : config_.call_timeout;
    const double waited = seconds_since(called ? std::max(since, called_since) : since);
    if (limit > 0 && waited > limit) {
      report.fault = Fault::kTimeout;
      report.wait = steps.wait();
      report.seconds = waited;
      report.all_called = called;
      break;
    }
  }
  backoff.reset();
  report_fault(prepared.call, report);
  return false;
}

bool Engine::all_called(const Prepared& prepared) const {
  for (int32_t r = 0; r < topology_.num_ranks; ++r) {
    if (r == config_.rank || !prepared.involved[r]) continue;
    const CallRecord seen{memory_.observe(layout_.symmetric.call(r))};
    if (seen.ahead_of(prepared.call.epoch.number) < 0) return false;
  }
  return true;
}

// A peer's socket reaches end-of-file when its process ends, however it ends.
void Engine::poll_peers() {
  for (size_t r = 0; r < config_.peer_sockets.size(); ++r) {
    if (config_.peer_sockets[r] < 0 || gone_[r].load()) continue;
    pollfd peer{config_.peer_sockets[r], POLLRDHUP, 0};
    if (poll(&peer, 1, 0) > 0 && (peer.revents & (POLLRDHUP | POLLHUP | POLLERR)) != 0)
      gone_[r].store(true, std::memory_order_release);
  }
}

// ---- failing -----------------------------------------------------------------------------------

// Who began it: a rank that says it failed by itself, else the end of the chain of waits.
int32_t Engine::find_root(int32_t from) const {
  for (int32_t r = 0; r < topology_.num_ranks; ++r) {
    const AbortWord word{memory_.observe(layout_.symmetric.abort(r))};
    if (word.set() && word.culprit() < 0) return r;
  }
  int32_t at = from;
  for (int32_t steps = 0; at >= 0 && steps < topology_.num_ranks; ++steps) {
    const AbortWord word{memory_.observe(layout_.symmetric.abort(at))};
    if (!word.set()) break;
    at = word.culprit();
  }
  return at;
}

// Whether nothing that is still to come could change find_root(): somebody says that it failed by
// itself, or every live rank has spoken.
bool Engine::chain_is_written(int32_t from) const {
  const int32_t root = find_root(from);
  if (root >= 0) {
    const AbortWord word{memory_.observe(layout_.symmetric.abort(root))};
    if (memory_.peer_gone(root) || (word.set() && word.culprit() < 0)) return true;
  }
  for (int32_t r = 0; r < topology_.num_ranks; ++r)
    if (!AbortWord{memory_.observe(layout_.symmetric.abort(r))}.set() && !memory_.peer_gone(r) &&
        config_.bases[r] != nullptr)
      return false;
  return true;
}

// The first fault of a group: tells the peers at once and keeps the report. The abort is in every
// live peer's memory before the call returns. Other workers of the call stop at their next step.
void Engine::report_fault(const Call& call, Report report) {
  worker_failed_.store(true);
  const std::lock_guard once(fault_mutex_);
  if (faulted_) return;
  faulted_ = true;
  report.epoch = call.epoch.number;
  const bool own = report.fault == Fault::kCancelled || report.wait.peer == config_.rank;
  // Published is whom we waited for, so that others can follow the chain to its end.
  const int32_t culprit = report.wait.peer >= 0 ? report.wait.peer : report.aborter;
  HostMover mover;
  announce_abort(call, memory_, mover, own ? -1 : culprit);
  const int32_t from = report.aborter >= 0 ? report.aborter : culprit;
  // Words of different ranks come in any order, so the chain is given time to be written. Peers
  // answer an abort with their own; a rank that is stuck does not, and ends the chain.
  const double grace = own                               ? 0
                       : report.fault == Fault::kTimeout ? 0.5
                       : report.fault == Fault::kAborted ? 0.05
                                                         : 0;
  const auto start = Clock::now();
  while (!chain_is_written(from) && seconds_since(start) < grace) {
    poll_peers();
    std::this_thread::sleep_for(std::chrono::milliseconds(1));
  }
  report.root = own ? config_.rank : find_root(from);
  if (report.fault == Fault::kAborted && report.root >= 0) {
    const CallRecord first{memory_.observe(layout_.symmetric.call(report.root))};
    if (first.kind() == RecordKind::kRejected) report.fault = Fault::kRejected;
  }
  const std::lock_guard lock(submit_mutex_);
  report_ = report;
}

// Ends the failed call and all after it. Only once its workers have put down what they held: from
// here on the caller may change or free what the call was reading.
void Engine::settle_failure() {
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
    shift_.wait(seen);
    seen = shift_.load();
    if (stop_helpers_.load()) return;
    work(*shared_, worker, {});
    if (helpers_busy_.fetch_sub(1) == 1) helpers_busy_.notify_all();
  }
}

}  // namespace uec::host
