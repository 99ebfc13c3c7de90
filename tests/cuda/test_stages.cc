// Launches of the local stages over a driver that only records its calls: parameters, arguments,
// and the order between streams and captures.
#include <atomic>
#include <cstring>
#include <memory>
#include <thread>
#include <vector>

#include "cuda/stages.hpp"
#include "recorder.hpp"
#include "support/check.hpp"
#include "support/plans.hpp"
#include "support/watchdog.hpp"

namespace {

using namespace uec::cuda;
using Log = std::vector<std::string>;

Handle handle(uintptr_t value) { return reinterpret_cast<Handle>(value); }
std::string on(Handle stream) { return " on " + recorder::name_of(stream); }

const Handle kContext = handle(0xC);
const Handle kStream = handle(7), kOther = handle(8);
const StageKernels kKernels{handle(0xB1), handle(0xB2), handle(0xB3), handle(0xB4),
                            handle(0xB5), handle(0xB6), handle(0xB7)};
constexpr int32_t kPlanWarps = 5, kBankPlanWarps = 4, kMaxRuns = 9;

// Stages of rank 1 of three, whose seven experts have homes in any order.
struct Fixture {
  explicit Fixture(int32_t warp_size = 32)
      : shape(1, 2, {2, 0, 0, 1, 2, 0, 0}, {4, 5, 5}, true, warp_size),
        constants(shape.constants_bytes() / 4),
        state(shape.state_bytes(kMaxRuns) / 8 + 1) {
    recorder::State& s = recorder::state();
    s.launches.clear();
    s.complete = true;
    s.capturing = 0;
    s.on_launch = [this](const recorder::Launch& launch) {
      if (launch.kernel == kKernels.plan_in_bank)
        in_bank = *static_cast<const BankPlanArgs*>(launch.arguments);
      else if (launch.kernel == kKernels.plan)
        plan = *static_cast<const PlanArgs*>(launch.arguments);
      else if (launch.kernel == kKernels.shares)
        shares = *static_cast<const SharesArgs*>(launch.arguments);
      else if (launch.kernel == kKernels.save_plan)
        saved = *static_cast<const SaveArgs*>(launch.arguments);
      else
        reroute = *static_cast<const RerouteArgs*>(launch.arguments);
    };
    stages =
        std::make_unique<Stages>(recorder::make_driver(), kContext, shape, kKernels, kPlanWarps,
                                 kBankPlanWarps, address(constants.data()), &faults);
    stages->bind_state(address(state.data()), kMaxRuns);
    recorder::take_log();
  }
  ~Fixture() {
    recorder::complete_all();
    stages.reset();
    recorder::state().on_launch = nullptr;
  }

  static Address address(const void* at) { return reinterpret_cast<Address>(at); }

  void launch_plan(Handle stream) {
    stages->plan({.load = 1, .num_sources = 3, .objective = {}}, stream);
  }
  void launch_ids(Handle stream, int64_t count = 10) {
    stages->reroute({.routing = Routing::kIds, .count = count, .element_bytes = 4}, stream);
  }

  StageShape shape;
  std::vector<int32_t> constants;
  std::vector<uint64_t> state;
  StageFaults faults;
  PlanArgs plan;
  BankPlanArgs in_bank;
  SharesArgs shares;
  RerouteArgs reroute;
  SaveArgs saved;
  std::unique_ptr<Stages> stages;
};

std::string event_of(const std::string& line) {  // "record 1001 on 7"
  CHECK(line.starts_with("record "));
  return line.substr(7, line.find(" on ") - 7);
}

void check_plan() {
  Fixture f;
  f.stages->plan({.load = 0x100,
                  .kept_load = 0x200,
                  .slot_expert = 0x300,
                  .slot_quota = 0x400,
                  .home_quota = 0x500,
                  .num_sources = 1,
                  .objective = {.target_ppm = 1'234'567}},
                 kStream);
  const recorder::Launch& launch = recorder::state().launches.back();
  CHECK(launch.kernel == kKernels.plan);
  CHECK(launch.stream == kStream);
  CHECK_EQ(launch.grid[0] * launch.grid[1] * launch.grid[2], 1);
  CHECK_EQ(launch.block[0], 32 * kPlanWarps);
  CHECK_EQ(launch.shared_bytes, f.shape.plan_shared_bytes(kPlanWarps));
  const PlanArgs& args = f.plan;
  CHECK_EQ(args.load.address, 0x100);
  CHECK_EQ(args.kept_load.address, 0x200);
  CHECK_EQ(args.slot_expert.address, 0x300);
  CHECK_EQ(args.slot_quota.address, 0x400);
  CHECK_EQ(args.home_quota.address, 0x500);
  CHECK_EQ(args.fault.address, Fixture::address(&f.faults.plan));
  CHECK_EQ(args.num_sources, 1);
  CHECK_EQ(args.objective.target_ppm, 1'234'567);
  CHECK_EQ(args.num_ranks, 3);
  CHECK_EQ(args.num_experts, 7);
  CHECK_EQ(args.slots_per_rank, 2);
  CHECK_EQ(args.max_local_experts, 4);
  CHECK_EQ(args.allow_cross_domain, 1);
  const auto has = [](const int32_t* at, std::vector<int32_t> values) {
    CHECK(std::equal(values.begin(), values.end(), at));
  };
  has(args.home, {2, 0, 0, 1, 2, 0, 0});
  has(args.domain, {4, 5, 5});
  has(args.local_begin, {0, 4, 5, 7});
  has(args.local_experts, {1, 2, 5, 6, 3, 0, 4});

  f.stages->plan({.load = 0x101, .num_sources = 3, .objective = {}, .bank = 0x600, .moves = 0x700},
                 kStream);
  const recorder::Launch& other = recorder::state().launches.back();
  CHECK(other.kernel == kKernels.plan_in_bank);
  CHECK_EQ(other.block[0], 32 * kBankPlanWarps);
  CHECK_EQ(other.shared_bytes, f.shape.bank_plan_shared_bytes(kBankPlanWarps));
  CHECK_EQ(f.in_bank.plan.load.address, 0x101);
  CHECK_EQ(f.in_bank.plan.max_local_experts, 4);
  CHECK_EQ(f.in_bank.bank.address, 0x600);
  CHECK_EQ(f.in_bank.moves.address, 0x700);
}

void check_reroute(int32_t warp_size) {
  Fixture f(warp_size);
  RerouteCall call{.load = 0x100,
                   .slot_expert = 0x200,
                   .slot_quota = 0x300,
                   .home_quota = 0x400,
                   .home = 0x480,
                   .source = 2,
                   .routing = Routing::kIds,
                   .from = 0x500,
                   .to = 0x600,
                   .count = 3 * 32 * warp_size + 1,
                   .element_bytes = 8};
  f.stages->reroute(call, kStream);
  const auto launches = recorder::state().launches;
  CHECK_EQ(launches.size(), 2);
  CHECK(launches[0].kernel == kKernels.shares && launches[1].kernel == kKernels.reroute_int64);
  CHECK(launches[0].stream == kStream && launches[1].stream == kStream);
  CHECK_EQ(launches[0].grid[0], 2);  // seven experts, four warps
  CHECK_EQ(launches[0].block[0], 4 * warp_size);
  CHECK_EQ(launches[0].shared_bytes, f.shape.shares_shared_bytes());
  CHECK_EQ(launches[1].grid[0], 4);  // two ids for each thread
  CHECK_EQ(launches[1].block[0], 16 * warp_size);
  CHECK_EQ(launches[1].shared_bytes, f.shape.reroute_shared_bytes());
  CHECK_EQ(f.shares.state.address, Fixture::address(f.state.data()));
  CHECK_EQ(f.shares.load.address, 0x100);
  CHECK_EQ(f.shares.slot_expert.address, 0x200);
  CHECK_EQ(f.shares.slot_quota.address, 0x300);
  CHECK_EQ(f.shares.home_quota.address, 0x400);
  CHECK_EQ(f.shares.home.address, 0x480);
  CHECK_EQ(f.shares.shape.rank, 2);  // the source, not this rank
  CHECK_EQ(f.shares.shape.per_rank, 4 + 2);
  CHECK_EQ(f.shares.shape.max_runs, kMaxRuns);
  CHECK(std::memcmp(&f.shares.shape, &f.reroute.shape, sizeof(RerouteShape)) == 0);
  CHECK_EQ(f.reroute.state.address, f.shares.state.address);
  CHECK_EQ(f.reroute.fault.address, Fixture::address(&f.faults.reroute));
  CHECK_EQ(f.reroute.from, 0x500);
  CHECK_EQ(f.reroute.to, 0x600);
  CHECK_EQ(f.reroute.count, call.count);
  CHECK(f.reroute.routing == Routing::kIds);
  CHECK_EQ(f.reroute.probs, 0);

  call.element_bytes = 4;
  f.stages->reroute(call, kStream);
  CHECK(recorder::state().launches.back().kernel == kKernels.reroute_int32);

  call.routing = Routing::kMap;
  call.count = 129;
  call.probs = 0x700;
  call.physical_probs = 0x800;
  call.instances = 0x900;
  call.element_bytes = 2;
  f.stages->reroute(call, kStream);
  const recorder::Launch& map = recorder::state().launches.back();
  CHECK(map.kernel == kKernels.reroute_map);
  CHECK_EQ(map.grid[0], 3);  // 16 warps of four tokens
  CHECK(f.reroute.routing == Routing::kMap);
  CHECK_EQ(f.reroute.probs, 0x700);
  CHECK_EQ(f.reroute.physical_probs, 0x800);
  CHECK_EQ(f.reroute.instances.address, 0x900);
  CHECK_EQ(f.reroute.prob_bytes, 2);
}

void check_state() {
  Fixture f;
  const auto check = [&](std::vector<uint64_t>& memory, int32_t max_runs) {
    RerouteArrays arrays;
    RerouteArrays::cut(reinterpret_cast<std::byte*>(memory.data()), f.shape.reroute(max_runs),
                       &arrays);
    const auto has = [](const int32_t* at, std::vector<int32_t> values) {
      CHECK(std::equal(values.begin(), values.end(), at));
    };
    has(arrays.home, {2, 0, 0, 1, 2, 0, 0});
    has(arrays.main_id, {12, 0, 1, 6, 13, 2, 3});
    has(arrays.slot_id, {4, 7, 14});
  };
  check(f.state, kMaxRuns);
  std::vector<uint64_t> larger(f.shape.state_bytes(33) / 8 + 1);
  f.stages->bind_state(Fixture::address(larger.data()), 33);
  CHECK_EQ(f.stages->max_runs(), 33);
  check(larger, 33);
  f.launch_ids(kStream);
  CHECK_EQ(f.reroute.state.address, Fixture::address(larger.data()));
  CHECK_EQ(f.reroute.shape.max_runs, 33);
}

// Launches follow each other on any streams; a reroute's two kernels count as one.
void check_order() {
  Fixture f;
  f.launch_plan(kStream);
  Log log = recorder::take_log();
  CHECK_EQ(log.size(), 2);
  CHECK(log[0] == "launch" + on(kStream));
  const std::string used = event_of(log[1]);
  CHECK(log[1].ends_with(on(kStream)));
  f.launch_ids(kOther);
  CHECK(recorder::take_log() == (Log{"wait for " + used + on(kOther), "launch" + on(kOther),
                                     "launch" + on(kOther), "record " + used + on(kOther)}));
  f.launch_plan(kStream);
  CHECK(recorder::take_log().front() == "wait for " + used + on(kStream));
}

// A capture has an order of its own: nothing in it waits for what is outside, and nothing outside
// for what is in it.
void check_captures() {
  Fixture f;
  recorder::State& s = recorder::state();
  f.launch_ids(kStream);
  const std::string used = event_of(recorder::take_log().back());
  s.capturing = 1;
  s.capture = 21;
  CHECK(f.stages->is_capturing(kStream));
  f.launch_plan(kStream);
  Log log = recorder::take_log();
  CHECK(log.front() == "launch" + on(kStream));
  const std::string captured = event_of(log.back());
  CHECK(captured != used);
  f.launch_ids(kOther);  // of the same capture
  log = recorder::take_log();
  CHECK(log.front() == "wait for " + captured + on(kOther));
  CHECK(log.back() == "record " + captured + on(kOther));
  s.capturing = 0;
  CHECK(!f.stages->is_capturing(kStream));
  f.launch_plan(kStream);
  log = recorder::take_log();
  CHECK(log.front() == "wait for " + used + on(kStream));
  CHECK(log.back() == "record " + used + on(kStream));
  s.capturing = 1;
  s.capture = 22;  // another
  f.launch_ids(kStream);
  CHECK(recorder::take_log().front() == "launch" + on(kStream));
  s.capturing = 0;
}

// Follows what was launched before: a reroute may still read what was saved there earlier.
void check_save() {
  Fixture f(2);
  f.launch_ids(kStream);
  const std::string used = event_of(recorder::take_log().back());
  f.stages->save_plan({.fields = {{0x10, 0x20, 3}, {0x30, 0x40, 0}},
                       .num_fields = 2,
                       .in_use = 0x50,
                       .generation = 7,
                       .tag = 8},
                      kOther);
  const Log log = recorder::take_log();
  CHECK(log.front() == "wait for " + used + on(kOther));
  CHECK(log.back() == "record " + used + on(kOther));
  const recorder::Launch& launch = recorder::state().launches.back();
  CHECK(launch.kernel == kKernels.save_plan);
  CHECK_EQ(launch.grid[0] * launch.grid[1] * launch.grid[2], 1);
  CHECK_EQ(launch.block[0], kSaveThreads / 32 * 2);
  CHECK_EQ(launch.shared_bytes, kSaveSharedBytes);
  CHECK_EQ(f.saved.fields[0].to.address, 0x10);
  CHECK_EQ(f.saved.fields[0].from.address, 0x20);
  CHECK_EQ(f.saved.fields[0].count, 3);
  CHECK_EQ(f.saved.num_fields, 2);
  CHECK_EQ(f.saved.in_use.address, 0x50);
  CHECK_EQ(f.saved.generation, 7);
  CHECK_EQ(f.saved.tag, 8);
  CHECK_EQ(f.saved.fault.address, Fixture::address(&f.faults.save));
}

void check_idle() {
  Fixture f;
  CHECK(f.stages->is_idle());
  recorder::State& s = recorder::state();
  s.complete = false;
  s.capturing = 1;
  f.launch_plan(kStream);
  CHECK(f.stages->is_idle());  // nothing has run
  s.capturing = 0;
  f.launch_plan(kStream);
  CHECK(!f.stages->is_idle());
  CHECK(!f.stages->await_idle([] { return true; }));
  std::atomic<bool> gone{false};
  std::thread waits([&] {
    f.stages.reset();  // memory is the caller's to free from then on
    gone = true;
  });
  std::this_thread::sleep_for(std::chrono::milliseconds(30));
  CHECK(!gone);
  recorder::complete_all();
  waits.join();
}

void check_faults() {
  Fixture f;
  CHECK_EQ(f.stages->take_faults().plan, 0);
  f.faults.plan = PlanStatus{LoadFault::kTooMany, 6}.word();
  f.faults.reroute.routing = static_cast<uint64_t>(Routing::kMap);
  f.faults.reroute.status = {.fault = uec::RerouteFault::kBadSlot, .position = 5, .value = 77};
  f.faults.save = {.tag = 9, .generation = 44};
  const StageFaults taken = f.stages->take_faults();
  CHECK(PlanStatus::of(taken.plan).fault == LoadFault::kTooMany);
  CHECK_EQ(PlanStatus::of(taken.plan).expert, 6);
  CHECK_EQ(taken.reroute.routing, 2);
  CHECK_EQ(taken.reroute.status.value, 77);
  CHECK_EQ(f.faults.plan, 0);
  CHECK_EQ(f.faults.reroute.routing, 0);
  CHECK_EQ(taken.save.tag, 9);
  CHECK_EQ(taken.save.generation, 44);
  CHECK_EQ(f.faults.save.tag, 0);
  CHECK(PlanStatus::of(PlanStatus{LoadFault::kTooManyInAll, -1}.word()).expert == -1);
}

// The host reads a status only when it is complete, and is done with it before the next is written.
// `put(i)` writes the i-th behind `flag`; `take(i)`: whether the host has it.
template <class Put, class Take>
void hand_over(uint64_t& flag_word, Put put, Take take) {
  constexpr int32_t kTimes = 2000;
  std::thread device([&] {
    std::atomic_ref flag(flag_word);
    for (int32_t i = 1; i <= kTimes; ++i) {
      while (flag.load(std::memory_order_acquire) != 0) std::this_thread::yield();
      put(i);
      flag.store(1, std::memory_order_release);
    }
  });
  for (int32_t i = 1; i <= kTimes; i += take(i)) {
  }
  device.join();
}

void check_faults_are_handed_over() {
  Fixture f;
  StageFaults& faults = f.faults;
  hand_over(
      faults.reroute.routing,
      [&](int32_t i) { faults.reroute.status.position = faults.reroute.status.value = i; },
      [&](int32_t i) {
        const StageFaults taken = f.stages->take_faults();
        if (taken.reroute.routing == 0) return false;
        CHECK_EQ(taken.reroute.status.position, i);
        CHECK_EQ(taken.reroute.status.value, i);
        return true;
      });
  hand_over(
      faults.save.tag, [&](int32_t i) { faults.save.generation = i; },
      [&](int32_t i) {
        const StageFaults taken = f.stages->take_faults();
        if (taken.save.tag == 0) return false;
        CHECK_EQ(taken.save.generation, i);
        return true;
      });
}

void check_refusals() {
  Fixture f;
  recorder::state().launch_result = 719;
  bool thrown = false;
  try {
    f.launch_plan(kStream);
  } catch (const DriverError&) {
    thrown = true;
  }
  recorder::state().launch_result = 0;
  CHECK(thrown);
  CHECK(f.stages->is_idle());
  CHECK(recorder::take_log().empty());
  f.launch_plan(kStream);
  CHECK(recorder::take_log().front() == "launch" + on(kStream));
}

}  // namespace

int main() {
  const Watchdog watchdog("a wait that does not end");
  check_plan();
  check_reroute(32);
  check_reroute(2);
  check_state();
  check_order();
  check_captures();
  check_save();
  check_idle();
  check_faults();
  check_faults_are_handed_over();
  check_refusals();
  CHECK_EQ(recorder::state().contexts, 0);
  CHECK_EQ(recorder::state().events, 0);
}
