// The worklists of random plans in every mode.
#include "support/plans.hpp"
#include "support/worklist_checks.hpp"

namespace {

using uec::Mode;

void check_case(const PlanCase& c, const uec::TileMap& tiles, Mode mode) {
  worklist_checks::check_all(c, tiles, ScheduleArrays(c, tiles, mode).schedule);
}

}  // namespace

int main() {
  Random random(5);
  const Tiles large({2 << 20, 100'001}, 32 << 10), small({1, 3}, 32 << 10);
  const Tiles odd({(128 << 10) + 1, 100}, 64 << 10);
  for (int repeat = 0; repeat < scaled(1000); ++repeat) {
    PlanCase c = draw_case(random, repeat % 10 == 0 ? 36 : 10);
    if (repeat % 2 == 1) draw_residents(c, random);
    for (const Tiles* tiles : {&large, &small, &odd})
      for (const Mode mode : {Mode::kPush, Mode::kPull, Mode::kDirect})
        check_case(c, tiles->map(), mode);
  }
}
