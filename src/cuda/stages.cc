#include "cuda/stages.hpp"

#include <atomic>
#include <chrono>
#include <thread>
#include <utility>

namespace uec::cuda {
namespace {

constexpr unsigned kEventDisableTiming = 2;
constexpr int32_t kThreadsOfAWarp = 32;  // that config.hpp counts with

// The plan kernel's constants, one after another.
struct Constants {
  int64_t home, domain, local_begin, local_experts, count;

  explicit Constants(const StageShape& s)
      : home(0),
        domain(home + s.num_experts()),
        local_begin(domain + s.num_ranks()),
        local_experts(local_begin + s.num_ranks() + 1),
        count(local_experts + s.num_experts()) {}
};

}  // namespace

// ---- sizes --------------------------------------------------------------------------------------

StageShape::StageShape(int32_t rank, int32_t slots_per_rank, std::vector<int32_t> home,
                       std::vector<int32_t> domain, bool allow_cross_domain, int32_t warp_size)
    : rank(rank),
      slots_per_rank(slots_per_rank),
      home(std::move(home)),
      domain(std::move(domain)),
      allow_cross_domain(allow_cross_domain),
      warp_size(warp_size),
      local_begin(num_ranks() + 1),
      local_experts(num_experts()) {
  max_local_experts = group_local_experts(topology(), local_begin.data(), local_experts.data());
}

Topology StageShape::topology() const {
  Topology t;
  t.num_ranks = num_ranks();
  t.num_experts = num_experts();
  t.slots_per_rank = slots_per_rank;
  t.home = home.data();
  t.domain = domain.data();
  t.allow_cross_domain = allow_cross_domain;
  return t;
}

RerouteShape StageShape::reroute(int32_t max_runs) const {
  RerouteShape s;
  s.rank = rank;
  s.num_ranks = num_ranks();
  s.num_experts = num_experts();
  s.slots_per_rank = slots_per_rank;
  s.per_rank = max_local_experts + slots_per_rank;
  s.max_runs = max_runs;
  return s;
}

int64_t StageShape::plan_shared_bytes(int32_t num_warps) const {
  return cuda::plan_shared_bytes(topology(), num_warps);
}
int64_t StageShape::bank_plan_shared_bytes(int32_t num_warps) const {
  return cuda::bank_plan_shared_bytes(topology(), num_warps);
}
int64_t StageShape::shares_shared_bytes() const { return grid_of_shares().shared_bytes; }
int64_t StageShape::reroute_shared_bytes() const { return grid_of_ids(0).shared_bytes; }
int32_t StageShape::runs_of_ids(int64_t num_ids) const { return grid_of_ids(num_ids).num_blocks; }
int32_t StageShape::runs_of_map(int64_t num_tokens) const {
  return grid_of_map(num_tokens).num_blocks;
}
int64_t StageShape::state_bytes(int32_t max_runs) const {
  RerouteArrays arrays;
  return RerouteArrays::cut(nullptr, reroute(max_runs), &arrays);
}
int64_t StageShape::constants_bytes() const {
  return Constants(*this).count * static_cast<int64_t>(sizeof(int32_t));
}

RerouteGrid StageShape::grid_of_ids(int64_t num_ids) const {
  return RerouteGrid::of_ids(reroute(), num_ids, kRerouteThreads / kThreadsOfAWarp * warp_size,
                             warp_size);
}
RerouteGrid StageShape::grid_of_map(int64_t num_tokens) const {
  return RerouteGrid::of_map(reroute(), num_tokens, kRerouteThreads / kThreadsOfAWarp * warp_size,
                             warp_size);
}
RerouteGrid StageShape::grid_of_shares() const {
  return RerouteGrid::of_shares(reroute(), kSharesThreads / kThreadsOfAWarp * warp_size, warp_size);
}

// ---- life ---------------------------------------------------------------------------------------

Stages::Stages(const Driver& driver, Handle context, StageShape shape, const StageKernels& kernels,
               int32_t num_plan_warps, int32_t num_bank_plan_warps, Address constants,
               StageFaults* faults)
    : driver_(driver),
      context_(context),
      shape_(std::move(shape)),
      kernels_(kernels),
      num_plan_warps_(num_plan_warps),
      num_bank_plan_warps_(num_bank_plan_warps),
      constants_(constants),
      faults_(faults) {
  std::vector<int32_t> image;
  for (const auto* part :
       {&shape_.home, &shape_.domain, &shape_.local_begin, &shape_.local_experts})
    image.insert(image.end(), part->begin(), part->end());
  const ContextScope current(driver_, context_);
  copy_to_device(driver_, constants_, image.data(), image.size() * sizeof(int32_t));
  used_ = make_event();
  captured_ = make_event();
}

Stages::~Stages() {
  if (!maker_.is_this()) return;  // a forked child has no device
  try {
    await_idle([] { return false; });
    const ContextScope current(driver_, context_);
    driver_.cuEventDestroy(used_);
    driver_.cuEventDestroy(captured_);
  } catch (const DriverError&) {  // the context is gone, and all that was in it
  }
}

Handle Stages::make_event() const {
  Handle event = nullptr;
  require(driver_, driver_.cuEventCreate(&event, kEventDisableTiming), "cuEventCreate");
  return event;
}

void Stages::bind_state(Address state, int32_t max_runs) {
  const std::lock_guard lock(mutex_);
  const RerouteShape shape = shape_.reroute(max_runs);
  std::vector<int32_t> main_id(shape.num_experts), slot_id(shape.num_ranks);
  for (int32_t r = 0; r < shape.num_ranks; ++r) {
    const int32_t begin = shape_.local_begin[r], end = shape_.local_begin[r + 1];
    for (int32_t i = begin; i < end; ++i)
      main_id[shape_.local_experts[i]] = r * shape.per_rank + i - begin;
    slot_id[r] = r * shape.per_rank + end - begin;
  }
  RerouteArrays arrays;  // where they will be on the device
  RerouteArrays::cut(reinterpret_cast<std::byte*>(state), shape, &arrays);
  const ContextScope current(driver_, context_);
  const auto copy = [&](int32_t* to, const std::vector<int32_t>& from) {
    copy_to_device(driver_, reinterpret_cast<Address>(to), from.data(),
                   from.size() * sizeof(int32_t));
  };
  copy(arrays.home, shape_.home);
  copy(arrays.main_id, main_id);
  copy(arrays.slot_id, slot_id);
  state_ = state;
  max_runs_ = max_runs;
}

// ---- launching ----------------------------------------------------------------------------------

PlanArgs Stages::plan_args(const Objective& objective) const {
  const Constants at(shape_);
  PlanArgs args;
  args.home = constants_ + at.home * sizeof(int32_t);
  args.domain = constants_ + at.domain * sizeof(int32_t);
  args.local_begin = constants_ + at.local_begin * sizeof(int32_t);
  args.local_experts = constants_ + at.local_experts * sizeof(int32_t);
  args.fault = reinterpret_cast<uint64_t>(&faults_->plan);
  args.objective = objective;
  args.num_ranks = shape_.num_ranks();
  args.num_experts = shape_.num_experts();
  args.slots_per_rank = shape_.slots_per_rank;
  args.max_local_experts = shape_.max_local_experts;
  args.allow_cross_domain = shape_.allow_cross_domain;
  return args;
}

void Stages::plan(const PlanCall& call, Handle stream) {
  const std::lock_guard lock(mutex_);
  const ContextScope current(driver_, context_);
  PlanArgs args = plan_args(call.objective);
  args.load = call.load;
  args.kept_load = call.kept_load;
  args.slot_expert = call.slot_expert;
  args.slot_quota = call.slot_quota;
  args.home_quota = call.home_quota;
  args.num_sources = call.num_sources;
  BankPlanArgs in_bank{args, call.bank, call.moves};
  const uint64_t capture = begin(stream);
  if (call.bank == 0)
    launch(kernels_.plan, 1, num_plan_warps_ * shape_.warp_size,
           shape_.plan_shared_bytes(num_plan_warps_), &args, stream);
  else
    launch(kernels_.plan_in_bank, 1, num_bank_plan_warps_ * shape_.warp_size,
           shape_.bank_plan_shared_bytes(num_bank_plan_warps_), &in_bank, stream);
  end(capture, stream);
}

void Stages::reroute(const RerouteCall& call, Handle stream) {
  const std::lock_guard lock(mutex_);
  const ContextScope current(driver_, context_);
  SharesArgs shares;
  shares.shape = shape_.reroute(max_runs_);
  shares.shape.rank = call.source;
  shares.state = state_;
  shares.load = call.load;
  shares.slot_expert = call.slot_expert;
  shares.slot_quota = call.slot_quota;
  shares.home_quota = call.home_quota;
  shares.home = call.home;
  RerouteArgs args;
  args.shape = shares.shape;
  args.state = state_;
  args.fault = reinterpret_cast<uint64_t>(&faults_->reroute);
  args.from = call.from;
  args.to = call.to;
  args.probs = call.probs;
  args.physical_probs = call.physical_probs;
  args.instances = call.instances;
  args.count = call.count;
  args.prob_bytes = call.probs == 0 ? 0 : call.element_bytes;
  args.routing = call.routing;
  const bool is_map = call.routing == Routing::kMap;
  const Handle of_ids = call.element_bytes == 8 ? kernels_.reroute_int64 : kernels_.reroute_int32;
  const RerouteGrid first = shape_.grid_of_shares();
  const RerouteGrid second =
      is_map ? shape_.grid_of_map(call.count) : shape_.grid_of_ids(call.count);
  const uint64_t capture = begin(stream);
  launch(kernels_.shares, first.num_blocks, first.num_threads, first.shared_bytes, &shares, stream);
  launch(is_map ? kernels_.reroute_map : of_ids, second.num_blocks, second.num_threads,
         second.shared_bytes, &args, stream);
  end(capture, stream);
}

void Stages::save_plan(SaveArgs args, Handle stream) {
  const std::lock_guard lock(mutex_);
  const ContextScope current(driver_, context_);
  args.fault = reinterpret_cast<uint64_t>(&faults_->save);
  const uint64_t capture = begin(stream);
  launch(kernels_.save_plan, 1, kSaveThreads / kThreadsOfAWarp * shape_.warp_size, kSaveSharedBytes,
         &args, stream);
  end(capture, stream);
}

// Orders a launch after the previous one in the same capture, or outside all captures. Returns the
// capture.
uint64_t Stages::begin(Handle stream) {
  const uint64_t capture = capture_of(driver_, stream);
  const bool follows = capture == 0 ? is_used_ : capture == capture_;
  if (follows)
    require(driver_, driver_.cuStreamWaitEvent(stream, capture == 0 ? used_ : captured_, 0),
            "cuStreamWaitEvent");
  return capture;
}

void Stages::end(uint64_t capture, Handle stream) {
  require(driver_, driver_.cuEventRecord(capture == 0 ? used_ : captured_, stream),
          "cuEventRecord");
  if (capture == 0)
    is_used_ = true;
  else
    capture_ = capture;
}

void Stages::launch(Handle kernel, int32_t num_blocks, int32_t num_threads, int64_t shared_bytes,
                    void* args, Handle stream) {
  void* arguments[] = {args};
  require(driver_,
          driver_.cuLaunchKernel(kernel, static_cast<unsigned>(num_blocks), 1, 1,
                                 static_cast<unsigned>(num_threads), 1, 1,
                                 static_cast<unsigned>(shared_bytes), stream, arguments, nullptr),
          "cuLaunchKernel");
  ++counts_.kernels;
}

// ---- waiting, and faults ------------------------------------------------------------------------

bool Stages::is_capturing(Handle stream) const {
  const ContextScope current(driver_, context_);
  return capture_of(driver_, stream) != 0;
}

bool Stages::is_idle() const {
  const std::lock_guard lock(mutex_);
  if (!is_used_) return true;
  const ContextScope current(driver_, context_);
  return has_completed(driver_, used_);
}

void Stages::pause() { std::this_thread::sleep_for(std::chrono::microseconds(20)); }

StageFaults Stages::take_faults() {
  StageFaults taken;
  std::atomic_ref plan(faults_->plan), routing(faults_->reroute.routing);
  std::atomic_ref saved(faults_->save.tag);
  // Acquire: pairs with the release in put_fault(), before which the status was written. Release:
  // pairs with its acquire, before it writes the next one.
  taken.plan = plan.load(std::memory_order_acquire);
  taken.reroute.routing = routing.load(std::memory_order_acquire);
  taken.save.tag = saved.load(std::memory_order_acquire);
  if (taken.plan != 0) plan.store(0, std::memory_order_release);
  if (taken.reroute.routing != 0) {
    taken.reroute.status = faults_->reroute.status;
    routing.store(0, std::memory_order_release);
  }
  if (taken.save.tag != 0) {
    taken.save.generation = faults_->save.generation;
    saved.store(0, std::memory_order_release);
  }
  return taken;
}

}  // namespace uec::cuda
