// The core without the engine: how a plan is cut into tiles and checked.
#include <core/plan/check.hpp>
#include <core/schedule/tiles.hpp>
#include <cstdint>

int main() {
  const int32_t home[] = {0, 1}, domain[] = {0, 0}, plan[] = {1, 0};
  const uec::Topology topology{2, 2, 1, home, domain, false};
  const int32_t segment[] = {0};
  const int64_t bytes[] = {100'000}, first_tile[] = {0, 4};
  const uec::TileMap tiles{1, segment, bytes, first_tile, 32 << 10, 1};
  const bool ok =
      uec::check_plan(uec::SingleThread{}, topology, plan).fault == uec::PlanFault::kNone &&
      tiles.span(3).bytes == 100'000 - 3 * (32 << 10);
  return ok ? 0 : 1;
}
