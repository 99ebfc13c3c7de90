// The bytes of a reduction: slot gradients, their sums, and main gradients.
#include "simulation/world.hpp"

namespace sim {

int32_t World::grad_segment(int32_t tile) const {
  int32_t segment = 0;
  while (tile >= grad_tile_begin_[segment + 1]) ++segment;
  return segment;
}

int64_t World::grad_elements(int32_t tile) const {
  const int32_t segment = grad_segment(tile);
  const int64_t offset = (tile - grad_tile_begin_[segment]) * shape.tile_bytes;
  return std::min(shape.tile_bytes, shape.grad_bytes[segment] - offset) /
         uec::bytes_of(shape.grad_type[segment]);
}

// The cell at an address, or -1, as locate(). `type`: of what is there; null: whatever it is. In
// sums there is fp32, of whichever tiles their hub has.
int32_t World::locate_gradient(int32_t agent, const uint8_t* address, int64_t bytes,
                               const uec::GradType* type) {
  const Place place = follow(agent, address);
  const auto [space, rank, offset] = place;
  const int64_t in_sums = offset - shape.layout.sums_base, sum = 2 * shape.tile_bytes;
  if (space == Space::kSymmetric && in_sums >= 0 &&
      in_sums < shape.slots_per_rank * shape.layout.sums_bytes) {
    const bool whole = in_sums % sum == 0 && bytes <= sum;
    if (!whole || type == nullptr || *type != uec::GradType::kFloat32) return stray(place, bytes);
    return sums_begin_ + rank * shape.slots_per_rank * sums_per_slot_ +
           static_cast<int32_t>(in_sums / sum);
  }
  const bool slots = space == Space::kSymmetric;
  if (!slots && (space != Space::kMainGrads || rank != rank_of(agent))) return stray(place, bytes);
  const auto& begin = slots ? shape.grad_offset : shape.main_grad_offset;
  const int32_t count = slots ? shape.slots_per_rank : shape.max_local_experts;
  for (size_t i = 0; i < shape.grad_bytes.size(); ++i) {
    // In elements, as they are in a slot and in a main gradient.
    const int64_t slot_element = uec::bytes_of(shape.grad_type[i]);
    const uec::GradType held = slots ? shape.grad_type[i] : shape.main_grad_type[i];
    const int64_t element = uec::bytes_of(held), row = shape.grad_bytes[i] / slot_element * element;
    const int64_t inside = offset - begin[i];
    if (inside < 0 || inside >= count * row) continue;
    const int64_t at = inside % row / element * slot_element;
    const int32_t tile = grad_tile_begin_[i] + static_cast<int32_t>(at / shape.tile_bytes);
    if (at % shape.tile_bytes != 0 || bytes > grad_elements(tile) * element) break;
    if (type != nullptr && *type != held) break;
    const auto idx = static_cast<int32_t>(inside / row);
    return slots ? slot_grad_cell(rank, idx, tile) : main_grad_cell(rank, idx, tile);
  }
  return stray(place, bytes);
}

Content World::read_gradient(int32_t agent, const uint8_t* source, int64_t elements,
                             uec::GradType type) {
  const int32_t cell = locate_gradient(agent, source, elements * uec::bytes_of(type), &type);
  if (cell < 0) return {};
  Tick* const known = clock(agent);
  const auto number = static_cast<Tick>(begin_load(agent));
  check_read(cell, known, agent, number);
  known[2 * num_agents_ + agent] = number;
  const Content& found = cells_[cell].content;
  return {found.id, std::min(found.bytes, elements)};
}

void World::store_gradient(int32_t agent, const uint8_t* destination, Content content,
                           uec::GradType type) {
  const int32_t cell =
      locate_gradient(agent, destination, content.bytes * uec::bytes_of(type), &type);
  if (cell < 0) return;
  const auto number = static_cast<int32_t>(++stores_[agent]);
  begin_operation(agent, {Operation::kRead, static_cast<int16_t>(agent), cell, number, 0,
                          content.bytes, content});
}

void World::clear_gradient(int32_t agent, const uint8_t* destination, int64_t bytes) {
  const int32_t cell = locate_gradient(agent, destination, bytes, nullptr);
  if (cell < 0) return;
  const int32_t tile = (cell - slot_grads_begin_) % num_grad_tiles();
  store_gradient(agent, destination, {kCleared, bytes / uec::bytes_of(grad_type(tile))},
                 grad_type(tile));
}

}  // namespace sim
