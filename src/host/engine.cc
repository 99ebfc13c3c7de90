#include "host/engine.hpp"

#include <poll.h>

#include <algorithm>
#include <chrono>

#include "core/digest.hpp"
#include "core/gather.hpp"
#include "core/worklist.hpp"
#include "host/backoff.hpp"

namespace uec::host {
namespace {

using Clock = std::chrono::steady_clock;

double seconds_since(Clock::time_point start) {
  return std::chrono::duration<double>(Clock::now() - start).count();
}

Topology make_topology(const EngineConfig& c) {
  return {static_cast<int32_t>(c.domain.size()),
          c.num_experts,
          c.slots_per_rank,
          c.home.data(),
          c.domain.data(),
          c.allow_cross_domain};
}

// What ranks of one group must have in common before any call.
uint64_t initial_digest(const EngineConfig& c) {
  uint64_t d = mix(c.num_experts, c.slots_per_rank);
  d = digest_ints(d, c.home.data(), c.home.size());
  d = digest_ints(d, c.domain.data(), c.domain.size());
  for (const int64_t bytes : c.segment_bytes) d = mix(d, bytes);
  return mix(mix(d, c.tile_bytes), c.allow_cross_domain);
}

}  // namespace

EngineLayout::EngineLayout(const EngineConfig& c)
    : slot_offset(c.segment_bytes.size()),
      region_offset(c.segment_bytes.size()),
      main_idx(c.num_experts),
      num_mains(c.domain.size()) {
  for (int32_t e = 0; e < c.num_experts; ++e) main_idx[e] = num_mains[c.home[e]]++;
  max_mains = *std::max_element(num_mains.begin(), num_mains.end());
  int64_t tiles = 0;
  for (size_t i = 0; i < c.segment_bytes.size(); ++i) {
    tiles += ceil_div(c.segment_bytes[i], c.tile_bytes);
    region_offset[i] = round_up(region_bytes, kSegmentAlign);
    region_bytes = region_offset[i] + max_mains * c.segment_bytes[i];
  }
  region_bytes = round_up(region_bytes, kSlotAlign);
  const int64_t finest = TileMap::tiles_per_group(c.tile_bytes, kWideFanout + 1);
  symmetric = SymmetricLayout::make(make_topology(c), max_mains, ceil_div(tiles, finest),
                                    static_cast<int32_t>(c.segment_bytes.size()),
                                    c.segment_bytes.data(), slot_offset.data());
}

Engine::Engine(EngineConfig config)
    : config_(std::move(config)),
      layout_(config_),
      topology_(make_topology(config_)),
      gone_(new std::atomic<bool>[config_.domain.size()]()),
      memory_(config_.bases.data(), config_.rank, layout_.symmetric.doorbell, gone_.get()),
      digest_(initial_digest(config_)) {
  const Capacity capacity{topology_.num_ranks,
                          topology_.num_experts,
                          topology_.slots_per_rank,
                          layout_.num_mains[config_.rank],
                          static_cast<int32_t>(config_.segment_bytes.size()),
                          config_.num_workers};
  for (uint64_t i = 0; i < kDepth; ++i) {
    calls_.push_back(std::make_unique<Prepared>(capacity));
    Call& call = calls_.back()->call;
    call.rank = config_.rank;
    call.num_ranks = topology_.num_ranks;
    call.layout = layout_.symmetric;
    call.addresses.bases = config_.bases.data();
    call.addresses.segment_bytes = config_.segment_bytes.data();
    call.addresses.slot_offset = layout_.slot_offset.data();
    call.addresses.num_mains = capacity.num_mains;
    call.addresses.region_offset = layout_.region_offset.data();
    call.tiles.tile_bytes = config_.tile_bytes;
  }
  background_ = std::thread([this] { background_loop(); });
  for (int32_t i = 1; i < config_.num_workers; ++i)
    helpers_.emplace_back([this, i] { helper_loop(i); });
}

Engine::~Engine() { close(); }

int32_t Engine::add_region(std::vector<const uint8_t*> bases) {
  const std::lock_guard lock(submit_mutex_);
  regions_.push_back(std::move(bases));
  return static_cast<int32_t>(regions_.size()) - 1;
}

// ---- submitting --------------------------------------------------------------------------------

// The storage of the next call, once the call that used it last has finished. Null: the group has
// failed or is closed, and the call ends where it begins.
Prepared* Engine::begin_call(Operation operation, std::unique_lock<std::mutex>& lock) {
  while (submitted_.load() - completed_.load() >= kDepth && failed_.load() == 0) {
    const uint64_t oldest = completed_.load() + 1;
    lock.unlock();
    wait(oldest);
    lock.lock();
  }
  if (failed_.load() != 0) return nullptr;
  if (closed_) {
    report_ = {};
    report_.fault = Fault::kCancelled;
    report_.epoch = submitted_.load() + 1;
    failed_.store(report_.epoch);
    return nullptr;
  }
  Prepared* prepared = calls_[(submitted_.load() + 1) % kDepth].get();
  prepared->operation = operation;
  return prepared;
}

uint64_t Engine::enter_call(Prepared& prepared, uint64_t digest, bool background,
                            std::unique_lock<std::mutex>& lock) {
  const uint64_t epoch = submitted_.load() + 1;
  // Chained, so that two ranks that ever differed cannot agree again.
  digest_ = mix(digest_, digest);
  prepared.call.epoch = {epoch, CallRecord::make(epoch, digest_, RecordKind::kCall)};
  prepared.call.reset_counters();
  submitted_.store(epoch);
  if (background) {
    background_until_.store(epoch);
    lock.unlock();
    queued_.notify_all();
  }
  return epoch;
}

void Engine::select_segments(Prepared& prepared, const int32_t* segments, int32_t count) const {
  prepared.call.tiles.num_segments = count;
  prepared.first_tile[0] = 0;
  for (int32_t i = 0; i < count; ++i) {
    prepared.segment[i] = segments[i];
    prepared.bytes[i] = config_.segment_bytes[segments[i]];
    prepared.first_tile[i + 1] =
        prepared.first_tile[i] + ceil_div(prepared.bytes[i], config_.tile_bytes);
  }
}

uint64_t Engine::replicate(const ReplicateArgs& args, bool background, Mode* mode) {
  std::unique_lock lock(submit_mutex_);
  *mode = Mode::kDirect;
  Prepared* const storage = begin_call(Operation::kReplicate, lock);
  if (storage == nullptr) return submitted_ += 1;
  Prepared& prepared = *storage;
  Call& call = prepared.call;
  select_segments(prepared, args.segments, args.num_segments);
  make_schedule(topology_, call.tiles, args.slot_expert, args.mode, args.region >= 0, config_.cost,
                prepared.scratch, prepared.shape, prepared.schedule);
  build_worklist(topology_, call.tiles, prepared.schedule, layout_.main_idx.data(), config_.rank,
                 call.work);
  for (size_t i = 0; i < prepared.mains.size(); ++i)
    prepared.mains[i] = reinterpret_cast<const uint8_t*>(args.mains[i]);
  const bool pull = prepared.schedule.mode == Mode::kPull;
  call.addresses.regions = pull ? regions_[args.region].data() : nullptr;
  *mode = prepared.schedule.mode;

  uint64_t digest = mix(static_cast<uint64_t>(Operation::kReplicate), args.plan_digest);
  digest = digest_ints(digest, args.slot_expert,
                       int64_t{topology_.num_ranks} * topology_.slots_per_rank);
  digest = digest_ints(digest, args.segments, args.num_segments);
  digest = mix(mix(digest, static_cast<uint64_t>(*mode)), pull ? args.region : -1);
  return enter_call(prepared, digest, background, lock);
}

uint64_t Engine::gather(const int32_t* row, int32_t* table, bool background) {
  std::unique_lock lock(submit_mutex_);
  Prepared* const storage = begin_call(Operation::kGather, lock);
  if (storage == nullptr) return submitted_ += 1;
  Prepared& prepared = *storage;
  Worklist& work = prepared.call.work;
  work.num_tasks = work.num_pieces = work.num_destinations = work.num_expected = 0;
  std::fill(prepared.opens.begin(), prepared.opens.end(), 0);
  std::fill(prepared.involved.begin(), prepared.involved.end(), 1);
  prepared.row = row;
  prepared.table = table;
  return enter_call(prepared, static_cast<uint64_t>(Operation::kGather), background, lock);
}

// A call's fixed parts, without the arrays of one that may be running.
Call Engine::bare_call(uint64_t epoch, CallRecord record) const {
  Call call;
  call.rank = config_.rank;
  call.num_ranks = topology_.num_ranks;
  call.epoch = {epoch, record};
  call.layout = layout_.symmetric;
  call.addresses.bases = config_.bases.data();
  return call;
}

void Engine::reject() {
  for (;;) {
    const uint64_t before = submitted_.load();
    // What was submitted before is still owed. If it fails, the peers have heard of that.
    if (before > 0 && !wait(before)) return;
    const std::lock_guard running(run_mutex_);
    std::unique_lock lock(submit_mutex_);
    if (closed_ || failed_.load() != 0) return;
    if (submitted_.load() != before) continue;  // another thread was faster
    const uint64_t epoch = before + 1;
    submitted_.store(epoch);
    lock.unlock();
    const Call call = bare_call(epoch, CallRecord::make(epoch, digest_, RecordKind::kRejected));
    HostMover mover;
    announce_absence(call, memory_, mover, call.epoch.record.word);
    Report report;
    report.fault = Fault::kRejected;
    report.wait.peer = config_.rank;
    report_fault(call, report);
    settle_failure();
    return;
  }
}

void Engine::abort() {
  cancel();
  const std::lock_guard running(run_mutex_);  // a call that is under way ends first, by itself
  if (failed_.load() != 0 || closed_) return;
  // Calls that were submitted but have not run fail too: peers in them must not wait for us.
  Report report;
  report.fault = Fault::kCancelled;
  report_fault(bare_call(completed_.load() + 1, {}), report);
  settle_failure();
}

void Engine::cancel() {
  cancelled_.store(true);
  Doorbell(config_.bases[config_.rank] + layout_.symmetric.doorbell).ring();
}

int32_t Engine::close() {
  {
    const std::lock_guard lock(submit_mutex_);
    if (closed_) return -1;
    closed_ = true;
  }
  const uint64_t last = submitted_.load();
  if (last > 0) wait(last);
  {
    const std::lock_guard lock(submit_mutex_);  // else the background thread could miss it
    stop_background_ = true;
  }
  queued_.notify_all();
  background_.join();
  {
    const std::lock_guard running(run_mutex_);  // no call is left that could need a helper
    stop_helpers_.store(true);
    shift_.fetch_add(1);
    shift_.notify_all();
  }
  for (std::thread& helper : helpers_) helper.join();
  if (failed_.load() != 0) return -1;
  const int32_t peer = disagreeing_peer();
  HostMover mover;
  announce_absence(bare_call(last, {}), memory_, mover,
                   CallRecord::make(last + 1, digest_, RecordKind::kClosed).word);
  return peer;
}

// A peer whose record for our last call differs from ours: a rank whose own plan was empty waits
// for nobody, and learns of it here or in its next call.
int32_t Engine::disagreeing_peer() {
  if (last_record_ == 0) return -1;
  const CallRecord own{last_record_};
  for (int32_t r = 0; r < topology_.num_ranks; ++r) {
    const CallRecord seen{memory_.observe(layout_.symmetric.call(r))};
    if (seen.word == 0) continue;  // ourselves, out of reach, or before its first call
    // A farewell is numbered one beyond the peer's last call and repeats that call's digest.
    const bool same_call = seen.kind() == RecordKind::kCall && seen.epoch_low() == own.epoch_low();
    const bool farewell =
        seen.kind() == RecordKind::kClosed && seen.epoch_low() == own.epoch_low() + 1;
    if ((same_call || farewell) && seen.digest() != own.digest()) return r;
  }
  return -1;
}

// ---- waiting -----------------------------------------------------------------------------------

bool Engine::is_completed(uint64_t epoch) const {
  return completed_.load() >= epoch || (failed_.load() != 0 && failed_.load() <= epoch);
}

bool Engine::wait(uint64_t epoch, const std::function<bool()>& interrupted) {
  while (!is_completed(epoch)) {
    if (background_until_.load() <= completed_.load()) {
      run_next(interrupted);
      continue;
    }
    // Ours or one before it belongs to the background thread; it wakes us when it has finished.
    {
      std::unique_lock lock(submit_mutex_);
      finished_.wait_for(lock, std::chrono::milliseconds(50), [&] {
        return is_completed(epoch) || background_until_.load() <= completed_.load();
      });
    }
    // The caller is about to free what the call reads, so the call has to end first.
    if (interrupted && interrupted()) cancel();
  }
  return failed_.load() == 0 || failed_.load() > epoch;
}

Report Engine::report() const {
  const std::lock_guard lock(submit_mutex_);
  return report_;
}

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
