// Larger groups than the tests of one kernel have: hubs of many replicas, transfers and reductions
// in turn, empty plans between them.
#include <cstdio>

#include "device/emulated_gradients.hpp"
#include "support/watchdog.hpp"

namespace {

using namespace device_tests;

// A Mode, or -1: by cost.
constexpr int32_t kSumModes[] = {static_cast<int32_t>(Mode::kPull),
                                 static_cast<int32_t>(Mode::kDirect), -1};

Options draw_options(Random& random, Plans plans) {
  Options options;
  options.plans = plans;
  options.segment_bytes = {draw(random, 1, 24) * kTile - draw(random, 0, 3) * 16,
                           draw(random, 1, 3) * kTile + draw(random, 0, 4000)};
  if (draw(random, 0, 2) == 0) options.skew = draw(random, 1, 15);
  options.grad_bytes = {draw(random, 1, 8) * kTile, 4 * draw(random, 1, 5000)};
  options.grad_type = {GradType::kFloat32, GradType::kBFloat16};
  options.tile_bytes = draw(random, 0, 2) == 0 ? 2 * kTile : kTile;
  return options;
}

// One hot expert with four replicas or more, and others as they come.
void draw_hot_plan(PlanCase& group, Random& random) {
  const int32_t ranks = group.num_ranks, experts = group.num_experts;
  const int32_t hot = draw(random, 0, experts - 1), count = draw(random, 4, ranks - 1);
  for (int32_t r = 0, placed = 0; r < ranks && placed < count; ++r) placed += group.place(hot, r);
  for (int32_t i = 0; i < ranks; ++i)
    group.place(draw(random, 0, experts - 1), draw(random, 0, ranks - 1));
}

void check_calls(uint32_t seed, Plans plans) {
  Random random(seed);
  const int32_t ranks = 5 + static_cast<int32_t>(seed) % 4;
  const PlanCase group = make_group(ranks, ranks * draw(random, 1, 3), draw(random, 1, 2));
  EmulatedGradients all(group, draw_options(random, plans),
                        {GradType::kFloat32, static_cast<GradType>(draw(random, 0, 1))}, 0);
  for (int call = 0; call < 4; ++call) {
    all.group().clear();
    if (draw(random, 0, 3) != 0) draw_hot_plan(all.group(), random);
    all.reduces = draw(random, 0, 2) == 0;
    all.adding_warps = draw(random, 1, 4);
    if (all.reduces)
      all.prepare_sums({kSumModes[draw(random, 0, 2)], draw(random, 0, 1) != 0});
    else
      all.prepare(static_cast<Mode>(draw(random, 0, 2)), {0, 1});
    if (draw(random, 0, 1) != 0) {
      all.launch_apart(draw(random, 1, 4));
      all.check_states();
    } else {
      all.launch(draw(random, 1, 4));
      all.check_success();
    }
  }
}

}  // namespace

int main() {
  const Watchdog watchdog("a launch that does not end");
  constexpr Plans kPlans[] = {Plans::kOnHost, Plans::kOnDevice, Plans::kMixed};
  const int groups = scaled(16);
  for (int i = 0; i < groups; ++i) check_calls(static_cast<uint32_t>(i), kPlans[i % 3]);
  std::printf("%d groups\n", groups);
}
