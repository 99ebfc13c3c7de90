// The reduce kernel on the emulated device: every number, in every mode, and how it fails.
#include <cstdio>

#include "device/emulated_gradients.hpp"
#include "device/failures.hpp"
#include "support/watchdog.hpp"

namespace {

using namespace device_tests;

constexpr Plans kPlans[] = {Plans::kOnHost, Plans::kOnDevice, Plans::kMixed};
constexpr GradType kTypes[] = {GradType::kFloat32, GradType::kBFloat16};
constexpr int32_t kPull = static_cast<int32_t>(Mode::kPull);
constexpr int32_t kDirect = static_cast<int32_t>(Mode::kDirect);
constexpr int32_t kModes[] = {kPull, kDirect, -1};

// Up to five tiles of fp32 sums; slots of some of these lie at odd addresses.
int64_t draw_elements(Random& random) {
  switch (draw(random, 0, 3)) {
    case 0:
      return draw(random, 1, 4) * kTile / 4;
    case 1:
      return draw(random, 1, 500) * 16;
    case 2:
      return draw(random, 1, 9000);
    default:
      return draw(random, 1, 40);
  }
}

// Several calls on one group, with other plans, modes, gradients and numbers of blocks.
void check_random(uint32_t seed, Plans plans) {
  Random random(seed);
  PlanCase group = make_group(draw(random, 2, 4), draw(random, 2, 7), draw(random, 1, 3));
  if (draw(random, 0, 2) == 0)
    for (int32_t& home : group.home) home = draw(random, 0, group.num_ranks - 1);
  Options options;
  options.segment_bytes = {64};
  options.plans = plans;
  const bool has_banks = plans == Plans::kOnDevice && draw(random, 0, 1) == 0;
  if (has_banks) {
    options.num_banks = 3;
    options.num_grad_banks = draw(random, 1, 3);
    options.instance_align = draw(random, 0, 1) * 4096;
  }
  std::vector<GradType> main_type;
  for (int32_t i = draw(random, 1, 3); i > 0; --i) {
    options.grad_type.push_back(kTypes[draw(random, 0, 1)]);
    options.grad_bytes.push_back(draw_elements(random) * uec::bytes_of(options.grad_type.back()));
    main_type.push_back(kTypes[draw(random, 0, 1)]);
  }
  EmulatedGradients ranks(group, options, main_type, draw(random, 0, 3) == 0);
  const int calls = scaled(4) + 1;
  for (int call = 0; call < calls; ++call) {
    draw_plan(ranks.group(), random);
    ranks.adding_warps = draw(random, 1, 3);
    const int32_t bank = has_banks ? draw(random, -1, options.num_banks - 1) : -1;
    ranks.prepare_sums({kModes[draw(random, 0, 2)], draw(random, 0, 3) != 0, bank});
    if (draw(random, 0, 2) != 0)
      ranks.launch_apart(draw(random, 1, 2));
    else
      ranks.launch(draw(random, 1, 2));
    if (call + 1 == calls || draw(random, 0, 1) == 0) ranks.check_states();
  }
}

// More replicas than a lane has loads under way, and one of fewer.
void check_fanout() {
  PlanCase group = make_group(11, 11, 1);
  for (int32_t r = 1; r < 10; ++r) CHECK(group.place(0, r));
  CHECK(group.place(4, 0));
  Options options;
  options.segment_bytes = {64};
  options.grad_type = {GradType::kFloat32, GradType::kBFloat16};
  options.grad_bytes = {3 * kTile + 44, kTile + 2 * 1001};
  EmulatedGradients ranks(group, options, {GradType::kBFloat16, GradType::kFloat32}, 0);
  ranks.adding_warps = 1;
  for (const int32_t mode : {kPull, kDirect}) {
    ranks.prepare_sums({mode, true});
    ranks.launch(1);
    ranks.check_success();
  }
}

// The default timeout suits a busy machine.
Options small(double seconds = 5) {
  Options options;
  options.segment_bytes = {8 * kTile + 48};
  options.grad_bytes = {8 * kTile + 48};
  options.grad_type = {GradType::kFloat32};
  options.call_timeout = options.wait_timeout = seconds;
  return options;
}

EmulatedGradients make_small(double seconds = 5, Plans plans = Plans::kOnHost) {
  Options options = small(seconds);
  options.plans = plans;
  return {three_ranks(), options, {GradType::kFloat32}, 0};
}

// More segments than a block has room for copies of their tables, some of a few numbers.
void check_many_segments() {
  PlanCase group = make_group(3, 6, 2);
  for (const auto& [expert, rank] : {std::pair{0, 1}, {0, 2}, {5, 0}, {2, 2}})
    CHECK(group.place(expert, rank));
  Options options;
  options.segment_bytes = {64};
  std::vector<GradType> main_type;
  for (int32_t i = 0; i < 300; ++i) {
    options.grad_type.push_back(kTypes[i / 2 % 2]);
    options.grad_bytes.push_back((i % 7 + 1) * 4);
    main_type.push_back(kTypes[i % 2]);
  }
  EmulatedGradients ranks(group, options, main_type, 0);
  for (const int32_t mode : {kPull, kDirect}) {
    ranks.prepare_sums({mode, true});
    ranks.launch(2);
    ranks.check_success();
  }
}

// Transfers and reductions take turns.
void check_turns() {
  auto ranks = make_small(60);
  for (int turn = 0; turn < 2; ++turn) {
    ranks.reduces = false;
    ranks.prepare(Mode::kPush, {0});
    ranks.launch(2);
    ranks.check_success();
    ranks.reduces = true;
    ranks.prepare_sums({kModes[turn], true});
    ranks.launch(2);
    ranks.check_success();
  }
}

void check_timeout(int32_t mode) {
  auto ranks = make_small(0.2);
  ranks.prepare_sums({mode, true});
  launch_without_the_last(ranks);
}

// A rank clears its slots and others do not: it makes another call.
void check_mismatch() {
  auto ranks = make_small();
  ranks.prepare_sums({kPull, true});
  ranks.disagree_on_sums(2, {kPull, false});
  launch_mismatch(ranks, 1);
}

void check_cancel() {
  auto ranks = make_small(60);
  ranks.prepare_sums({kPull, true});
  launch_and_cancel(ranks);
}

// A rank that has closed its group, one that has rejected its input, and a plan that a device
// refuses.
void check_absence() {
  for (const Notice notice : {Notice::kClosed, Notice::kRejected}) {
    auto ranks = make_small();
    ranks.notify(1, notice);
    ranks.prepare_sums({kDirect, true});
    ranks.launch(1, notice == Notice::kClosed ? 1 : 3);
    CHECK(ranks.report(0).fault == (notice == Notice::kClosed ? Fault::kClosed : Fault::kRejected));
    CHECK_EQ(ranks.report(0).root, 1);
  }
  auto ranks = make_small(60, Plans::kOnDevice);
  ranks.prepare_sums({kPull, true});
  ranks.plan(1)[2] = 3;
  ranks.launch(2);
  const uec::Report report = ranks.report(1);
  CHECK(report.fault == Fault::kRejected);
  CHECK_EQ(report.wait.seen, static_cast<uint64_t>(uec::PlanFault::kOutOfRange));
  CHECK_EQ(report.wait.expert, 3);
  for (const int32_t r : {0, 2}) CHECK_EQ(ranks.report(r).root, 1);
}

}  // namespace

int main() {
  const Watchdog watchdog("a launch that does not end");
  const int cases = scaled(40) + 4;
  for (int seed = 0; seed < cases; ++seed)
    check_random(static_cast<uint32_t>(seed), kPlans[seed % 3]);
  check_fanout();
  check_many_segments();
  check_turns();
  for (const int32_t mode : kModes) check_timeout(mode);
  check_mismatch();
  check_cancel();
  check_absence();
  std::printf("%d random groups\n", cases);
}
