#include "cuda/launcher.hpp"

#include <algorithm>
#include <atomic>
#include <chrono>
#include <thread>

#include "cuda/device/block.hpp"
#include "cuda/device/load_block.hpp"
#include "cuda/device/tables.hpp"

namespace uec::cuda {
namespace {

using Steady = std::chrono::steady_clock;
using std::chrono::milliseconds;

constexpr int64_t kStateBytes = sizeof(RankState);
constexpr int64_t kStatusBytes = round_up(sizeof(Status), 128);
constexpr unsigned kWarpThreads = 32;
constexpr unsigned kEventDisableTiming = 2;

double seconds_since(Steady::time_point start) {
  return std::chrono::duration<double>(Steady::now() - start).count();
}

bool is_set(const Interrupted& interrupted) { return interrupted && interrupted(); }

// Polls the device: often at first, then less. False: interrupted.
template <class Done>
bool poll(Done&& done, const Interrupted& interrupted) {
  const auto start = Steady::now();
  auto looked = start;
  while (!done()) {
    const auto now = Steady::now();
    if (now - start > milliseconds(1)) {
      std::this_thread::sleep_for(std::chrono::microseconds(50));
    } else {
      std::this_thread::yield();
    }
    if (now - looked < milliseconds(20)) continue;
    looked = now;
    if (is_set(interrupted)) return false;
  }
  return true;
}

}  // namespace

// Addresses differ from rank to rank; what decides the plan must not.
bool Request::can_launch_with(const Request& other) const {
  return operation == other.operation && tag == other.tag && bank == other.bank &&
         (load.load != 0) == (other.load.load != 0) && (plan != 0) == (other.plan != 0) &&
         (plan == 0 || plan_args.objective == other.plan_args.objective);
}

int64_t Launcher::tables_bytes(const Capacity& c) {
  Tables tables;
  return round_up(Tables::cut(nullptr, c, &tables), 128);
}
int64_t Launcher::banks_bytes(const Capacity& c) {
  BankTables banks;
  return round_up(BankTables::cut(nullptr, c, &banks), 128);
}
Launcher::DeviceLayout::DeviceLayout(const LauncherConfig& c)
    : rank_tables(tables_bytes(c.capacity) + banks_bytes(c.capacity)),
      call_block(call_block_bytes(c.capacity)),
      tables(round_up(c.num_ranks * kStateBytes, 128)),
      blocks(tables + c.num_ranks * rank_tables),
      // One more, for captured calls.
      total(blocks + static_cast<int64_t>(kDepth + 1) * c.num_ranks * call_block) {}

int64_t Launcher::device_bytes(const LauncherConfig& c) { return DeviceLayout(c).total; }
int64_t Launcher::pinned_bytes(const LauncherConfig& c) {
  return c.num_ranks * (kStatusBytes + static_cast<int64_t>(kDepth) * call_block_bytes(c.capacity));
}

Launcher::Shapes Launcher::shapes(const LauncherConfig& c, int32_t num_blocks) {
  const int32_t workers = block_workers(c.capacity, c.tile_bytes, c.max_shared_bytes, num_blocks);
  const BlockShape replicate{c.kernel, num_blocks, 2 * workers * c.warp_size,
                             shared_bytes(c.capacity, c.tile_bytes, workers)};
  return {replicate,
          {c.reduce, num_blocks, kReduceWarps * c.warp_size, reduce_shared_bytes(c.capacity)}};
}

int32_t Launcher::blocks_per_multiprocessor(const LauncherConfig& c) {
  const ContextScope current(c.driver, c.context);
  const auto fitting = [&](const BlockShape& shape) {
    int32_t blocks = 0;
    require(c.driver,
            c.driver.cuOccupancyMaxActiveBlocksPerMultiprocessor(
                &blocks, shape.kernel, shape.num_threads, static_cast<size_t>(shape.shared_bytes)),
            "cuOccupancyMaxActiveBlocksPerMultiprocessor");
    return blocks;
  };
  const Shapes all = shapes(c, c.num_sms);
  const int32_t blocks = fitting(all.replicate);
  return c.reduce == nullptr ? blocks : std::min(blocks, fitting(all.reduce));
}

Launcher::Launcher(const LauncherConfig& config)
    : config_(config),
      layout_(config),
      shapes_(shapes(config, config.num_sms)),
      background_(shapes(config, config.background_sms)) {
  const ContextScope current = scope();
  notice_event_ = make_event();
  line_ = make_line();
  captured_ = make_line();
  for (int32_t r = 0; r < config_.num_ranks; ++r) status(config_.first_rank + r) = Status{};
}

Launcher::~Launcher() {
  if (is_inherited()) return;
  try {
    const ContextScope current = scope();
    config_.driver.cuEventDestroy(notice_event_);
    destroy(line_);
    destroy(captured_);
  } catch (const DriverError&) {  // the context is gone, and all that was in it
  }
}

Launcher::Line Launcher::make_line() const {
  Line line;
  line.submitted.resize(config_.num_ranks);
  line.entries.resize(kDepth);
  for (Entry& e : line.entries) {
    e.done = make_event();
    e.stream.resize(config_.num_ranks);
    e.requests.resize(config_.num_ranks);
    for (int32_t r = 0; r < config_.num_ranks; ++r) e.before.push_back(make_event());
  }
  return line;
}

void Launcher::destroy(const Line& line) const {
  for (const Entry& e : line.entries) {
    config_.driver.cuEventDestroy(e.done);
    for (const Handle event : e.before) config_.driver.cuEventDestroy(event);
  }
}

Handle Launcher::make_event() const {
  Handle event = nullptr;
  require(config_.driver, config_.driver.cuEventCreate(&event, kEventDisableTiming),
          "cuEventCreate");
  return event;
}

// ---- where things lie ---------------------------------------------------------------------------

Address Launcher::state(int32_t rank) const {
  return config_.device + (rank - config_.first_rank) * kStateBytes;
}
Address Launcher::tables(int32_t rank) const {
  return config_.device + layout_.tables + (rank - config_.first_rank) * layout_.rank_tables;
}
Status& Launcher::status(int32_t rank) const {
  return *reinterpret_cast<Status*>(config_.pinned + (rank - config_.first_rank) * kStatusBytes);
}
std::byte* Launcher::block(int32_t rank, uint64_t call) const {
  const int64_t index =
      static_cast<int64_t>(call % kDepth) * config_.num_ranks + rank - config_.first_rank;
  uint8_t* const blocks = config_.pinned + config_.num_ranks * kStatusBytes;
  return reinterpret_cast<std::byte*>(blocks + index * layout_.call_block);
}

Address Launcher::device_block(int32_t rank, uint64_t call) const {
  const uint64_t index = is_captured(call) ? kDepth : call % kDepth;
  return config_.device + layout_.blocks +
         (static_cast<int64_t>(index) * config_.num_ranks + rank - config_.first_rank) *
             layout_.call_block;
}

// ---- submitting ---------------------------------------------------------------------------------

bool Launcher::await_storage(int32_t rank, uint64_t call, const Interrupted& interrupted) {
  if (call > kDepth && !await_launch(rank, call - kDepth, interrupted)) return false;
  if (call > kDepth && !await_done(call - kDepth, interrupted)) return false;
  const std::lock_guard lock(mutex_);
  return !is_ended(call);
}

void Launcher::submit(int32_t rank, uint64_t call, const Request& request, Handle stream) {
  const std::lock_guard lock(mutex_);
  enter(rank, call, request, stream);
}

uint64_t Launcher::submit_captured(int32_t rank, uint64_t capture, const Request& request,
                                   Handle stream) {
  const std::lock_guard lock(mutex_);
  if (capture != capture_) {  // a capture that was given up may have left ranks apart
    capture_ = capture;
    captured_.last = nullptr;
    const uint64_t most = *std::max_element(captured_.submitted.begin(), captured_.submitted.end());
    std::fill(captured_.submitted.begin(), captured_.submitted.end(), most);
    captured_.launched = captured_before_ = most;
  }
  const uint64_t next = captured_.submitted[rank - config_.first_rank] + 1;
  if (next > captured_.launched + kDepth)
    throw CaptureError("this rank is " + std::to_string(kDepth) +
                       " captured calls ahead of others that share its launches; have all of them"
                       " make each call before the next");
  const uint64_t call = kCaptured | next;
  enter(rank, call, request, stream);
  return call;
}

void Launcher::enter(int32_t rank, uint64_t call, const Request& request, Handle stream) {
  Line& line = this->line(call);
  const int32_t index = rank - config_.first_rank;
  Entry& e = line.entry(number(call));
  e.stream[index] = stream;
  e.requests[index] = request;
  e.in_place = config_.num_ranks == 1 && !request.background;
  if (!e.in_place)
    require(config_.driver, config_.driver.cuEventRecord(e.before[index], stream), "cuEventRecord");
  line.submitted[index] = number(call);
  const uint64_t all = *std::min_element(line.submitted.begin(), line.submitted.end());
  if (is_ended(call) || all < number(call) || !agree(e, call)) return;
  e.capture = is_captured(call) ? capture_ : 0;
  launch(call, e.in_place ? stream : is_captured(call) ? config_.captured_stream : config_.stream);
}

// The line's last work comes before what `stream` gets from now on: calls share a rank's state.
void Launcher::join(const Line& line, Handle stream) {
  if (line.last == nullptr) return;
  require(config_.driver, config_.driver.cuStreamWaitEvent(stream, line.last, 0),
          "cuStreamWaitEvent");
}

void Launcher::launch(uint64_t call, Handle stream) {
  const Driver& driver = config_.driver;
  const LauncherConfig& c = config_;
  Line& line = this->line(call);
  Entry& e = line.entry(number(call));
  // The group's own stream joins the capture by waiting for the callers' streams, so that has to
  // come before it waits for what was captured earlier.
  for (int32_t i = 0; i < c.num_ranks; ++i)
    if (e.stream[i] != stream || c.num_ranks > 1)
      require(driver, driver.cuStreamWaitEvent(stream, e.before[i], 0), "cuStreamWaitEvent");
  join(line, stream);
  if (e.requests.front().load.load != 0)
    launch_load(e, call, stream);
  else
    launch_transfer(e, call, stream);
  require(driver, driver.cuEventRecord(e.done, stream), "cuEventRecord");
  e.call = number(call);
  ++counts_.kernels;
  line.last = e.done;
  line.launched = number(call);
  launches_->notify_all();
}

void Launcher::launch_kernel(Handle kernel, int32_t num_blocks, int32_t num_threads,
                             int64_t shared_bytes, void* args, Handle stream) {
  void* arguments[] = {args};
  require(config_.driver,
          config_.driver.cuLaunchKernel(
              kernel, static_cast<unsigned>(num_blocks), static_cast<unsigned>(config_.num_ranks),
              1, static_cast<unsigned>(num_threads), 1, 1, static_cast<unsigned>(shared_bytes),
              stream, arguments, nullptr),
          "cuLaunchKernel");
}

// Each block has its own share of a call's pieces, and blocks wait for each other's. A cooperative
// launch starts none before there is room for all, those of every rank in it: in a plain one, the
// first ranks' blocks could fill the device and wait for others. A capture keeps that.
void Launcher::launch_together(const BlockShape& shape, void* args, Handle stream) {
  void* arguments[] = {args};
  require(config_.driver,
          config_.driver.cuLaunchCooperativeKernel(
              shape.kernel, static_cast<unsigned>(shape.num_blocks),
              static_cast<unsigned>(config_.num_ranks), 1, static_cast<unsigned>(shape.num_threads),
              1, 1, static_cast<unsigned>(shape.shared_bytes), stream, arguments),
          "cuLaunchCooperativeKernel");
}

// A replication, or a reduction.
void Launcher::launch_transfer(const Entry& e, uint64_t call, Handle stream) {
  const LauncherConfig& c = config_;
  copy_blocks(e, call, stream);
  if (!e.in_place && !is_captured(call))
    require(c.driver, c.driver.cuEventRecord(e.before.front(), stream), "cuEventRecord");
  LaunchArgs args;
  args.states = c.device;
  args.calls = device_block(c.first_rank, call);
  args.call_bytes = layout_.call_block;
  args.has_call_number = !is_captured(call);
  const Request& first = e.requests.front();
  args.tag = first.tag;
  args.bank = first.bank;
  for (int32_t i = 0; i < c.num_ranks; ++i) args.on_device[i] = e.requests[i].device;
  const bool reduces = first.operation == Operation::kReduce;
  const bool background = std::any_of(e.requests.begin(), e.requests.end(),
                                      [](const Request& r) { return r.background; });
  const Shapes& shapes = background ? background_ : shapes_;
  launch_together(reduces ? shapes.reduce : shapes.replicate, &args, stream);
}

void Launcher::launch_load(const Entry& e, uint64_t call, Handle stream) {
  const LauncherConfig& c = config_;
  LoadPlanArgs args;
  args.load.states = c.device;
  args.load.has_call_number = !is_captured(call);
  int64_t most_ids = 0;
  for (int32_t i = 0; i < c.num_ranks; ++i) {
    const Request& request = e.requests[i];
    args.load.calls[i] = request.load;
    args.plans[i] = request.plan;
    args.faults[i] = request.plan_args.fault.address;
    most_ids = max64(most_ids, request.load.count);
  }
  if (e.requests.front().plan == 0) {
    const LoadGrid grid =
        LoadGrid::of(c.capacity.num_ranks, c.capacity.num_experts, most_ids, kMaxLoadBlocks);
    return launch_kernel(c.load, grid.num_blocks, grid.num_threads, grid.shared_bytes, &args.load,
                         stream);
  }
  args.plan = e.requests.front().plan_args;
  Topology topology;  // its arrays are not looked at
  topology.num_ranks = c.capacity.num_ranks;
  topology.num_experts = c.capacity.num_experts;
  topology.slots_per_rank = c.capacity.slots_per_rank;
  const LoadGrid grid =
      LoadGrid::of_plan(topology, most_ids, kMaxLoadBlocks, c.plan_warps, c.warp_size);
  launch_kernel(c.load_plan, grid.num_blocks, grid.num_threads, grid.shared_bytes, &args, stream);
}

// Whether all ranks of a launch have made the same kind of call; if not, nothing is launched.
bool Launcher::agree(const Entry& e, uint64_t call) {
  const auto other = std::find_if(e.requests.begin(), e.requests.end(), [&](const Request& r) {
    return !r.can_launch_with(e.requests.front());
  });
  if (other == e.requests.end()) return true;
  Report report;
  report.fault = Fault::kMismatch;
  report.wait.peer = config_.first_rank + static_cast<int32_t>(other - e.requests.begin());
  end_calls_from(config_.first_rank, is_captured(call) ? line_.launched + 1 : call, report);
  return false;
}

// Copies the host's blocks to the device, unless every rank's plan is there.
void Launcher::copy_blocks(const Entry& e, uint64_t call, Handle stream) {
  const auto copy = [&](int32_t rank, int64_t offset, int64_t bytes) {
    require(config_.driver,
            config_.driver.cuMemcpyHtoDAsync(device_block(rank, call) + offset,
                                             block(rank, call) + offset, bytes, stream),
            "cuMemcpyHtoDAsync");
    ++counts_.copies;
  };
  const auto on_device = [](const Request& r) { return r.device.slot_expert != 0; };
  if (!std::all_of(e.requests.begin(), e.requests.end(), on_device))
    return copy(config_.first_rank, 0, config_.num_ranks * layout_.call_block);
  for (int32_t i = 0; i < config_.num_ranks; ++i) {
    if (e.requests[i].main_ptrs_bytes == 0) continue;
    const int32_t rank = config_.first_rank + i;
    const auto offset =
        static_cast<int64_t>(e.requests[i].device.main_ptrs.address - device_block(rank, call));
    copy(rank, offset, e.requests[i].main_ptrs_bytes);
  }
}

// No event marks the end of replays; their own clocks bound them. The driver refuses while
// anything is being captured on the device, by any thread and in any mode.
void Launcher::await_replays() {
  const ContextScope current = scope();
  {
    const std::lock_guard lock(mutex_);
    if (captured_.launched == 0) return;
  }
  require(config_.driver, config_.driver.cuCtxSynchronize(), "cuCtxSynchronize");
}

void Launcher::notify(int32_t rank, Notice notice) {
  await_replays();
  const ContextScope current = scope();
  const Driver& driver = config_.driver;
  {
    const std::lock_guard lock(mutex_);
    join(line_, config_.stream);
    Address states = state(rank);
    auto what = static_cast<int64_t>(notice);
    void* arguments[] = {&states, &what};
    require(driver,
            driver.cuLaunchKernel(config_.notice, 1, 1, 1, kWarpThreads, 1, 1, 0, config_.stream,
                                  arguments, nullptr),
            "cuLaunchKernel");
    require(driver, driver.cuEventRecord(notice_event_, config_.stream), "cuEventRecord");
    line_.last = notice_event_;
  }
  poll([&] { return has_completed(driver, notice_event_); }, {});
}

// ---- waiting ------------------------------------------------------------------------------------

bool Launcher::launched(uint64_t call) const {
  const std::lock_guard lock(mutex_);
  return line(call).launched >= number(call);
}

bool Launcher::await_launch(int32_t rank, uint64_t call, const Interrupted& interrupted) {
  const auto start = Steady::now();
  auto looked = start;
  std::unique_lock lock(mutex_);
  const Line& line = this->line(call);
  while (line.launched < number(call)) {
    if (is_ended(call)) return false;
    launches_->wait_for(lock, milliseconds(2));
    poll_failures();
    const double seconds = seconds_since(start);
    if (line.launched < number(call) && !is_ended(call) && config_.call_timeout > 0 &&
        seconds > config_.call_timeout) {
      const auto slowest = std::min_element(line.submitted.begin(), line.submitted.end());
      Report report;
      report.fault = Fault::kTimeout;
      report.root = config_.first_rank + static_cast<int32_t>(slowest - line.submitted.begin());
      report.wait = {FlagKind::kCall, report.root, -1, -1, *slowest, number(call)};
      report.seconds = seconds;
      end_calls_from(rank, line_.launched + 1, report);
    }
    if (Steady::now() - looked < milliseconds(20)) continue;
    looked = Steady::now();
    lock.unlock();
    if (is_set(interrupted)) return false;
    lock.lock();
  }
  return true;
}

bool Launcher::done(uint64_t call) {
  const std::lock_guard lock(mutex_);
  if (call <= completed_) return true;
  if (call > line_.launched) return false;
  const Entry& e = line_.entry(call);
  if (e.call != call) return true;  // its storage has been used again
  const ContextScope current = scope();
  if (!has_completed(config_.driver, e.done)) return false;
  completed_ = call;  // launches follow each other
  return true;
}

bool Launcher::await_done(uint64_t call, const Interrupted& interrupted) {
  return poll([&] { return done(call); }, interrupted);
}

bool Launcher::await_stream(Handle stream, const Interrupted& interrupted) {
  const ContextScope current = scope();
  const Handle event = make_event();
  require(config_.driver, config_.driver.cuEventRecord(event, stream), "cuEventRecord");
  const bool came = poll([&] { return has_completed(config_.driver, event); }, interrupted);
  config_.driver.cuEventDestroy(event);
  return came;
}

void Launcher::order(uint64_t call, Handle stream) {
  const std::lock_guard lock(mutex_);
  const Entry& e = line(call).entry(number(call));
  const bool is_latest = e.call == number(call);  // of those that use its events
  // It runs on the caller's own stream, so whatever comes next there follows it.
  if (is_latest && e.in_place && e.stream.front() == stream) return;
  const ContextScope current = scope();
  const uint64_t capture = capture_of(config_.driver, stream);
  if (is_captured(call)) {
    if (e.call < number(call))
      throw CaptureError("ranks that share a launch have to capture together, in one capture");
    // A call of an earlier capture has lost its events to a later one.
    const uint64_t own = is_latest ? e.capture : number(call) > captured_before_ ? capture_ : 0;
    if (capture == 0 || capture != own)
      throw CaptureError(
          "wait() for a call that is a part of a CUDA graph, outside of the capture that made it;"
          " wait in that capture, and for a replay with the stream of the replay");
    if (!is_latest) return join(captured_, stream);  // the later call comes after it
  } else if (capture != 0) {
    throw CaptureError(
        "wait() in a capture into a CUDA graph for a call that was made outside of it; wait before"
        " the capture");
  } else if (!is_latest || call <= completed_) {
    return;
  }
  require(config_.driver, config_.driver.cuStreamWaitEvent(stream, e.done, 0), "cuStreamWaitEvent");
}

void Launcher::order_behind_start(uint64_t call, Handle stream) {
  const std::lock_guard lock(mutex_);
  const Entry& e = line_.entry(call);
  if (e.call != call || e.in_place) return;
  require(config_.driver, config_.driver.cuStreamWaitEvent(stream, e.before.front(), 0),
          "cuStreamWaitEvent");
}

// ---- ending -------------------------------------------------------------------------------------

uint64_t Launcher::end(int32_t rank, Fault fault, bool owing) {
  const std::lock_guard lock(mutex_);
  const uint64_t submitted = line_.submitted[rank - config_.first_rank];
  Report report;
  report.fault = fault;
  report.wait.peer = report.root = rank;
  const uint64_t from = (owing ? std::max(submitted, line_.launched) : line_.launched) + 1;
  end_calls_from(rank, from, report);
  return from;
}

void Launcher::end_calls_from(int32_t rank, uint64_t from, const Report& report) {
  if (end_.rank >= 0 && end_.from <= from) return;
  end_ = {rank, from, report};
  end_.report.epoch = from;
  launches_->notify_all();
}

// A rank whose call failed on the device submits no more.
void Launcher::poll_failures() {
  for (int32_t r = config_.first_rank; r < config_.first_rank + config_.num_ranks; ++r) {
    Status& said = status(r);
    if (std::atomic_ref(said.failed_call).load(std::memory_order_acquire) != 0)
      end_calls_from(r, line_.launched + 1, said.report);
  }
}

Report Launcher::ended(int32_t rank, uint64_t call) const {
  const std::lock_guard lock(mutex_);
  if (!is_ended(call)) return {};
  Report report = end_.report;
  if (rank == end_.rank) return report;
  if (report.fault == Fault::kRejected) return report;
  if (report.fault == Fault::kClosed) {
    report.wait = {FlagKind::kCall, end_.rank, -1, -1, end_.from - 1, end_.from};
    return report;
  }
  report.fault = Fault::kAborted;
  report.aborter = end_.rank;
  report.wait = {FlagKind::kCall, end_.rank, -1, -1, end_.from - 1, end_.from};
  return report;
}

}  // namespace uec::cuda
