// What callers of a reduction write before it, and what they find after it.
#include "simulation/ranks.hpp"

namespace sim {

Content Simulation::slot_grad(int32_t call, int32_t expert, int32_t rank, int32_t tile) const {
  const uint64_t id = uint64_t{1} << 62 | (static_cast<uint64_t>(call) + 1) << 40 |
                      static_cast<uint64_t>(expert + 1) << 28 |
                      static_cast<uint64_t>(rank + 1) << 20 | static_cast<uint64_t>(tile + 1);
  return {id, world_->grad_elements(tile)};
}

Content Simulation::main_grad(int32_t call, int32_t expert, int32_t tile) const {
  return slot_grad(call, expert, -1, tile);
}

// main + (r1 + r2 + ... + rn), by ascending rank.
Content Simulation::reduced(const RankCall& made, int32_t call, int32_t expert,
                            int32_t tile) const {
  Content sum;
  const int32_t slots = case_.group.slots_per_rank;
  bool any = false;
  for (int32_t i = 0; i < case_.group.num_ranks * slots; ++i) {
    if (made.spec.plan[i] != expert) continue;
    const Content part = slot_grad(call, expert, i / slots, tile);
    sum = any ? add_part(sum, part) : part;
    any = true;
  }
  const Content main = main_grad(call, expert, tile);
  return any ? add_part(main, sum) : main;
}

// Before a call: empty slots hold values too.
void Simulation::write_gradients(int32_t rank, int32_t call) {
  const int32_t own = own_thread(rank);
  const RankCall& made = spec(rank, call);
  for (int32_t tile = 0; tile < world_->num_grad_tiles(); ++tile) {
    for (int32_t s = 0; s < case_.group.slots_per_rank; ++s) {
      const int32_t expert = made.spec.plan[rank * case_.group.slots_per_rank + s];
      world_->write_now(own, world_->slot_grad_cell(rank, s, tile),
                        expert >= 0 ? slot_grad(call, expert, rank, tile) : poison(call));
    }
    for (int32_t e = 0; e < case_.group.num_experts; ++e)
      if (case_.group.home[e] == rank)
        world_->write_now(own, world_->main_grad_cell(rank, main_idx_[e], tile),
                          main_grad(call, e, tile));
  }
}

// The caller has its slot gradients back.
void Simulation::spoil_slot_gradients(int32_t rank, bool checked) {
  for (int32_t tile = 0; tile < world_->num_grad_tiles(); ++tile)
    for (int32_t s = 0; s < case_.group.slots_per_rank; ++s)
      world_->write_now(own_thread(rank), world_->slot_grad_cell(rank, s, tile), Content{},
                        checked);
}

// A reduction has succeeded: main gradients are its sums, slots are cleared if they were meant to
// be, and nothing else was written.
void Simulation::check_gradients(int32_t rank) {
  const int32_t call = ranks_[rank].call, own = own_thread(rank);
  const RankCall& made = spec(rank, call);
  const auto require = [&](int32_t cell, const Content& right, Property property, const char* what,
                           int32_t idx, int32_t tile) {
    const Content found = world_->read_now(own, cell);
    if (found != right)
      world_->violate(property, "rank %d, %s %d, tile %d after call %d: %lld elements of %llx",
                      rank, what, idx, tile, call, static_cast<long long>(found.bytes),
                      static_cast<unsigned long long>(found.id));
  };
  for (int32_t tile = 0; tile < world_->num_grad_tiles(); ++tile) {
    for (int32_t e = 0; e < case_.group.num_experts; ++e)
      if (case_.group.home[e] == rank)
        require(world_->main_grad_cell(rank, main_idx_[e], tile), reduced(made, call, e, tile),
                Property::kWrongBytes, "main gradient", main_idx_[e], tile);
    for (int32_t s = 0; s < case_.group.slots_per_rank; ++s) {
      const int32_t expert = made.spec.plan[rank * case_.group.slots_per_rank + s];
      const int32_t cell = world_->slot_grad_cell(rank, s, tile);
      if (expert < 0)
        require(cell, poison(call), Property::kTouched, "empty slot", s, tile);
      else if (made.spec.zero)
        require(cell, {World::kCleared, world_->grad_elements(tile)}, Property::kWrongBytes, "slot",
                s, tile);
      else if (world_->grad_type(tile) != uec::GradType::kFloat32)  // else it may hold a sum
        require(cell, slot_grad(call, expert, rank, tile), Property::kTouched, "slot", s, tile);
    }
  }
}

}  // namespace sim
