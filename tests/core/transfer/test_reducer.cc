// Reductions over plain memory: by one thread that takes the steps of all ranks in any order, and
// by teams, where what one member has seen or stored is there for all, and every flag is published
// once.
#include "core/crowd.hpp"
#include "core/transfer/reduced.hpp"
#include "support/watchdog.hpp"

int main() {
  const Watchdog watchdog("members that do not meet");
  Random random(21);
  for (int repeat = 0; repeat < scaled(200); ++repeat) {
    const ReduceCase c = reducing::draw_reduction(random, 6);
    reducing::Reduced(c, draw(random, 1, 3), random).run([](const auto& steps) {
      steps(uec::SingleThread{});
    });
  }
  for (int repeat = 0; repeat < scaled(120); ++repeat) {
    const ReduceCase c = reducing::draw_reduction(random, 4);
    const int32_t size = draw(random, 2, 4);
    reducing::Reduced(c, draw(random, 1, 2), random).run([&](const auto& steps) {
      Crowd::run(size, [&] {
        steps(Crowd{});
        return 0;
      });
    });
  }
}
