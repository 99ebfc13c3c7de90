// The core's Adder over a world. Addends are read at the step; the sum is stored whenever the
// schedule says, unseen until then.
#pragma once

#include "core/base/digest.hpp"
#include "simulation/world.hpp"

namespace sim {

// A sum says what was added in which order: one of other parts, or of the same in another order, is
// another payload. A sum of one part is that part.
inline Content add_part(Content sum, Content part) {
  return {uec::mix(uec::mix(0xADD, sum.id), part.id), std::min(sum.bytes, part.bytes)};
}

class SimAdder : public uec::DeliveryPolicy {
 public:
  SimAdder(World& world, int32_t agent) : world_(world), agent_(agent) {}

  template <class Source>
  void sum(uint8_t* to, int32_t n, Source&& source, int64_t elements, uec::GradType type) {
    const Content sum = read_all(n, source, elements, type);
    world_.store_gradient(agent_, to, sum, uec::GradType::kFloat32);
  }

  template <class Source>
  void add(uint8_t* main, uec::GradType main_type, int32_t n, Source&& source, int64_t elements,
           uec::GradType type) {
    const Content sum = read_all(n, source, elements, type);
    const Content before = world_.read_gradient(agent_, main, elements, main_type);
    world_.store_gradient(agent_, main, add_part(before, sum), main_type);
  }

  void zero(uint8_t* to, int64_t bytes) { world_.clear_gradient(agent_, to, bytes); }

  // A block's warps are ahead of its additions by a few.
  bool vacant() const { return ticket() < 2 || world_.delivered(agent_, ticket() - 1); }
  uint32_t ticket() const { return world_.stores_issued(agent_); }

  template <class F>
  bool try_delivered(uint32_t ticket, F&& then) {
    if (!world_.delivered(agent_, ticket)) return false;
    world_.know_delivered(agent_, ticket);
    then(delivered());
    return true;
  }

  void loads_complete() { world_.loads_complete(agent_); }

 private:
  template <class Source>
  Content read_all(int32_t n, Source&& source, int64_t elements, uec::GradType type) {
    Content sum = world_.read_gradient(agent_, source(0), elements, type);
    for (int32_t i = 1; i < n; ++i)
      sum = add_part(sum, world_.read_gradient(agent_, source(i), elements, type));
    return sum;
  }

  World& world_;
  int32_t agent_;
};

}  // namespace sim
