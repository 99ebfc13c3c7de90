// The replicate kernel on the emulated device: every byte, in every mode, and how it fails.
#include <cstdio>

#include "device/failures.hpp"
#include "support/watchdog.hpp"

namespace {

using namespace device_tests;

constexpr Plans kPlans[] = {Plans::kOnHost, Plans::kOnDevice, Plans::kMixed};
constexpr Mode kModes[] = {Mode::kPush, Mode::kPull, Mode::kDirect};

int64_t draw_bytes(Random& random) {
  const int64_t tiles = draw(random, 1, 9) * kTile;
  switch (draw(random, 0, 3)) {
    case 0:
      return tiles;
    case 1:
      return tiles - 16 * draw(random, 1, 500);
    case 2:
      return tiles - draw(random, 1, 5000);
    default:
      return draw(random, 1, 40);
  }
}

// Several calls on one group, with other plans, modes, weights and numbers of blocks.
void check_random(uint32_t seed, bool far, Plans plans) {
  Random random(seed);
  PlanCase group = make_group(draw(random, 2, 4), draw(random, 2, 9), draw(random, 1, 3));
  Options options;
  options.far = far;
  options.plans = plans;
  if (far) {
    group.allow_cross_domain = true;
    for (int32_t r = 0; r < group.num_ranks; ++r) group.domain[r] = r % 2;
  }
  const int32_t num_segments = draw(random, 1, 3);
  for (int32_t i = 0; i < num_segments; ++i) options.segment_bytes.push_back(draw_bytes(random));
  if (draw(random, 0, 2) == 0) options.skew = draw(random, 1, 15);
  if (draw(random, 0, 2) == 0) options.tile_bytes = 2 * kTile;
  options.block_workers = draw(random, 1, most_workers(options.tile_bytes));
  EmulatedGroup ranks(group, options);
  const int calls = scaled(6) + 1;
  for (int call = 0; call < calls; ++call) {
    draw_plan(ranks.group(), random);
    std::vector<int32_t> segments;
    for (int32_t i = 0; i < num_segments; ++i)
      if (num_segments == 1 || draw(random, 0, 2) != 0) segments.push_back(i);
    if (segments.empty()) segments.push_back(0);
    const Mode mode = far ? kModes[2 * draw(random, 0, 1)] : kModes[draw(random, 0, 2)];
    ranks.prepare(mode, segments);
    if (far || draw(random, 0, 1) == 0)
      ranks.launch_apart(draw(random, 1, 2));
    else
      ranks.launch(draw(random, 1, 2));
    ranks.check_success();
  }
}

// Experts cross to a domain once, and are handed on by two ranks there.
void check_domains(Plans plans, bool far) {
  PlanCase group = make_group(5, 5, 2);
  group.allow_cross_domain = true;
  group.domain = {1, 0, 1, 0, 0};
  for (const int32_t r : {1, 2, 3, 4}) CHECK(group.place(0, r));
  for (const int32_t r : {0, 2}) CHECK(group.place(3, r));
  Options options;
  options.plans = plans;
  options.far = far;
  options.segment_bytes = {4 * kTile + 48};
  EmulatedGroup ranks(group, options);
  Random random(1);
  for (const Mode mode : {Mode::kPush, far ? Mode::kPush : Mode::kPull, Mode::kDirect}) {
    ranks.prepare(mode, {0});
    ranks.launch_apart(draw(random, 1, 2));
    ranks.check_success();
  }
}

// More segments than a block has room for copies of their tables.
void check_many_segments() {
  PlanCase group = make_group(2, 8, 2);
  CHECK(group.place(0, 1));
  CHECK(group.place(7, 0));
  Options options;
  options.segment_bytes.assign(300, 40);
  EmulatedGroup ranks(group, options);
  std::vector<int32_t> segments(300);
  for (int32_t i = 0; i < 300; ++i) segments[i] = i;
  ranks.prepare(Mode::kPull, segments);
  ranks.launch(2);
  ranks.check_success();
}

// The default timeout suits a busy machine.
Options small(double timeout = 5) {
  Options options;
  options.segment_bytes = {8 * kTile + 48};
  options.call_timeout = options.wait_timeout = timeout;
  return options;
}

void check_timeout(Mode mode) {
  EmulatedGroup ranks(three_ranks(), small(0.2));
  ranks.prepare(mode, {0});
  launch_without_the_last(ranks);
}

// Both wait for the last, and one of them is told by a signal that the other has given up.
void check_far_timeout() {
  PlanCase group = make_group(3, 3, 1);
  group.allow_cross_domain = true;
  group.domain = {0, 1, 2};
  CHECK(group.place(2, 0));
  CHECK(group.place(2, 1));
  Options options = small(0.2);
  options.far = true;
  EmulatedGroup ranks(group, options);
  ranks.prepare(Mode::kPush, {0});
  launch_without_the_last(ranks);
}

// A plan differs on one rank.
void check_mismatch(Mode mode) {
  EmulatedGroup ranks(three_ranks(), small());
  ranks.prepare(mode, {0});
  PlanCase other = three_ranks();
  other.clear();
  CHECK(other.place(1, 2));
  ranks.disagree(2, mode, other.slot_expert);
  launch_mismatch(ranks, 2);
}

// A rank makes a different call that concerns no other. All succeed, and learn of it at the next
// call, though that moves nothing.
void check_late_mismatch() {
  PlanCase group = make_group(3, 3, 1);
  CHECK(group.place(0, 1));
  EmulatedGroup ranks(group, small());
  ranks.prepare(Mode::kPush, {0});
  PlanCase nothing = group;
  nothing.clear();
  ranks.disagree(2, Mode::kPush, nothing.slot_expert);
  ranks.launch(2);
  ranks.check_success();
  ranks.group().clear();
  ranks.prepare(Mode::kPush, {0});
  ranks.launch(1);
  CHECK(ranks.report(2).fault == Fault::kMismatch || ranks.report(2).fault == Fault::kAborted);
  CHECK_EQ(ranks.status(2).failed_call, uint64_t{2});
}

void check_cancel() {
  const Options options = small(60);
  EmulatedGroup ranks(three_ranks(), options);
  ranks.prepare(Mode::kPush, {0});
  launch_and_cancel(ranks);
}

// Before the call begins, also if it would never have had to wait.
void check_cancelled_before() {
  PlanCase group = make_group(2, 2, 1);
  EmulatedGroup ranks(group, small());
  ranks.prepare(Mode::kDirect, {0});
  std::atomic_ref(ranks.status(1).cancelled).store(1);
  ranks.launch(1);
  CHECK(ranks.report(1).fault == Fault::kCancelled);
  CHECK_EQ(ranks.status(1).failed_call, uint64_t{1});
}

void check_notices() {
  {
    EmulatedGroup ranks(three_ranks(), small());
    ranks.notify(1, Notice::kRejected);
    CHECK(ranks.report(1).fault == Fault::kRejected);
    CHECK_EQ(ranks.status(1).failed_call, uint64_t{1});
    ranks.prepare(Mode::kPush, {0});
    ranks.launch(1);
    for (const int32_t r : {0, 2}) {
      CHECK(ranks.report(r).fault == Fault::kRejected);
      CHECK_EQ(ranks.report(r).root, 1);
    }
    CHECK_EQ(ranks.report(1).root, 1);
  }
  {
    EmulatedGroup ranks(three_ranks(), small());
    ranks.notify(2, Notice::kAborted);
    CHECK(ranks.report(2).fault == Fault::kCancelled);
    ranks.notify(2, Notice::kAborted);  // twice is once
    ranks.prepare(Mode::kDirect, {0});
    ranks.launch(1);
    CHECK(ranks.report(0).fault == Fault::kAborted);
    CHECK_EQ(ranks.report(0).root, 2);
  }
  {
    EmulatedGroup ranks(three_ranks(), small());
    ranks.prepare(Mode::kPush, {0});
    ranks.launch(2);
    ranks.check_success();
    for (int32_t r = 0; r < 3; ++r) {
      ranks.notify(r, Notice::kClosed);
      CHECK_EQ(ranks.status(r).disagreement, int64_t{-1});
      CHECK_EQ(ranks.status(r).failed_call, uint64_t{0});
    }
  }
}

// The device of rank 1 refuses its plan: it reports why, and no other rank waits for it.
template <class Spoil>
void check_refusal(uint64_t reason, int32_t expert, int32_t piece, Spoil&& spoil) {
  PlanCase group = make_group(3, 6, 2);  // experts 2 and 3 are rank 1's
  CHECK(group.place(2, 0));
  CHECK(group.place(5, 1));
  Options options = small();
  options.plans = Plans::kOnDevice;
  EmulatedGroup ranks(group, options);
  ranks.prepare(Mode::kPush, {0});
  spoil(ranks);
  ranks.launch(2);
  const uec::Report report = ranks.report(1);
  CHECK(report.fault == Fault::kRejected);
  CHECK_EQ(report.root, 1);
  CHECK_EQ(report.wait.seen, reason);
  CHECK_EQ(report.wait.expert, expert);
  CHECK_EQ(report.wait.piece, piece);
  for (const int32_t r : {0, 2}) {
    CHECK(ranks.report(r).fault == Fault::kRejected);
    CHECK_EQ(ranks.report(r).root, 1);
    CHECK_EQ(ranks.status(r).failed_call, uint64_t{1});
  }
  ranks.launch(2);  // at once
  CHECK_EQ(ranks.state(1).epoch, uint64_t{0});
}

void check_refusals() {
  const auto slot = [](int32_t at, int32_t expert) {
    return [=](EmulatedGroup& ranks) { ranks.plan(1)[at] = expert; };
  };
  using uec::PlanFault, uec::cuda::Refusal;
  const auto number = [](auto fault) { return static_cast<uint64_t>(fault); };
  check_refusal(number(PlanFault::kOutOfRange), 6, 3, slot(3, 6));
  check_refusal(number(PlanFault::kOnHome), 2, 3, slot(3, 2));
  check_refusal(number(PlanFault::kDuplicate), 5, 3, slot(3, 5));
  check_refusal(number(Refusal::kWeights), 2, 0,
                [](EmulatedGroup& ranks) { ranks.main(1, 0) = nullptr; });
  std::vector<int32_t> home{0, 0, 1, 1, 2, 0};
  check_refusal(number(Refusal::kHome), 5, -1, [&](EmulatedGroup& ranks) {
    ranks.device_call(1).home = reinterpret_cast<uint64_t>(home.data());
  });
}

// Captured calls have an epoch, but no number of the host's.
void check_not_counted() {
  PlanCase group = three_ranks();
  EmulatedGroup ranks(group, small());
  for (const bool has_call_number : {true, false, true}) {
    ranks.prepare(Mode::kPush, {0});
    ranks.launch(2, 0, has_call_number);
    ranks.check_success();
  }
  CHECK_EQ(ranks.state(0).last_call, uint64_t{2});
  CHECK_EQ(ranks.state(0).epoch, uint64_t{3});
  std::atomic_ref(ranks.status(1).cancelled).store(1);
  ranks.prepare(Mode::kPush, {0});
  ranks.launch(2);
  CHECK_EQ(ranks.status(1).failed_call, uint64_t{3});
  CHECK_EQ(ranks.report(1).epoch, uint64_t{4});
}

}  // namespace

int main() {
  const Watchdog watchdog("a launch that does not end");
  check_not_counted();
  const int cases = scaled(40) + 4;
  for (int seed = 0; seed < cases; ++seed)
    check_random(static_cast<uint32_t>(seed), seed % 2 == 1, kPlans[seed / 2 % 3]);
  check_many_segments();
  for (const Plans plans : kPlans)
    for (const bool far : {false, true}) check_domains(plans, far);
  for (const Mode mode : kModes) {
    check_timeout(mode);
    check_mismatch(mode);
  }
  check_far_timeout();
  check_late_mismatch();
  check_cancel();
  check_cancelled_before();
  check_notices();
  check_refusals();
  std::printf("%d random groups\n", cases);
}
