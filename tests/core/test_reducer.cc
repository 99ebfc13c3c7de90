// A reduction over plain memory, by one thread that takes the steps of all ranks in any order.
#include "core/reduced.hpp"

int main() {
  Random random(21);
  for (int repeat = 0; repeat < scaled(200); ++repeat) {
    const ReduceCase c = reducing::draw_reduction(random, 6);
    reducing::Reduced(c, draw(random, 1, 3), random).run([](const auto& steps) {
      steps(uec::Alone{});
    });
  }
}
