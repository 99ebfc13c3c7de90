#include "simulation/world.hpp"

#include "core/base/digest.hpp"

namespace sim {

World::World(const Shape& s, Arena& arena) : shape(s) {
  num_agents_ = s.num_ranks * s.agents_per_rank;
  ticks_ = 3 * num_agents_;
  tile_begin_.push_back(0);
  for (const int64_t bytes : s.segment_bytes)
    tile_begin_.push_back(tile_begin_.back() +
                          static_cast<int32_t>(uec::ceil_div(bytes, s.tile_bytes)));
  main_weights_begin_ = s.num_ranks * s.slots_per_rank * num_tiles();
  tables_begin_ = main_weights_begin_ + s.num_ranks * s.max_local_experts * num_tiles();
  rows_begin_ = tables_begin_ + s.num_ranks * s.num_ranks;
  slot_grads_begin_ = rows_begin_ + s.num_ranks;
  grad_tile_begin_.push_back(0);
  for (const int64_t bytes : s.grad_bytes)
    grad_tile_begin_.push_back(grad_tile_begin_.back() +
                               static_cast<int32_t>(uec::ceil_div(bytes, s.tile_bytes)));
  main_grads_begin_ = slot_grads_begin_ + s.num_ranks * s.slots_per_rank * num_grad_tiles();
  sums_begin_ = main_grads_begin_ + s.num_ranks * s.max_local_experts * num_grad_tiles();
  sums_per_slot_ = static_cast<int32_t>(s.layout.sums_bytes / (2 * s.tile_bytes));
  num_cells_ = sums_begin_ + s.num_ranks * s.slots_per_rank * sums_per_slot_;
  flag_at_.assign(s.layout.slots_base / 8, -1);
  flags_per_rank_ = 0;
  const auto number = [this](int64_t offset) { flag_at_[offset / 8] = flags_per_rank_++; };
  for (int32_t r = 0; r < s.num_ranks; ++r) {
    number(s.layout.call(r));
    number(s.layout.open(r));
    number(s.layout.abort(r));
    number(s.layout.gathered(r));
    for (int32_t i = 0; i < s.slots_per_rank; ++i) number(s.layout.done(i, r));
    for (int32_t i = -s.slots_per_rank; i < s.max_local_experts; ++i) number(s.layout.pulled(i, r));
  }
  for (int32_t i = 0; i < s.slots_per_rank; ++i)
    for (int64_t g = 0; g < s.layout.max_groups; ++g) number(s.layout.ready(i, g));
  if (!s.grad_bytes.empty()) {
    for (int32_t i = 0; i < s.slots_per_rank; ++i)
      for (int32_t r = 0; r < s.num_ranks; ++r) number(s.layout.consumed(i, r));
    for (int32_t i = 0; i < s.max_local_experts; ++i)
      for (int64_t g = 0; g < s.layout.max_grad_groups; ++g) number(s.layout.summed(i, g));
  }
  const int32_t num_flags = s.num_ranks * flags_per_rank_;
  initial_.assign(num_flags, 0);
  // A ring of stages and as many held groups, two tiles each, to every rank.
  max_operations_ = 16 * s.num_ranks + 8;

  asleep = arena.array<uint8_t>(2 * num_agents_);
  gone = arena.array<uint8_t>(s.num_ranks * s.num_ranks);
  freed = arena.array<uint8_t>(s.num_ranks);
  call_now = arena.array<int32_t>(s.num_ranks);
  clocks_ = arena.array<Tick>(num_agents_ * ticks_);
  counter_clocks_ = arena.array<Tick>(s.num_ranks * s.max_tasks * ticks_);
  cells_ = arena.array<Access>(num_cells_);
  reads_ = arena.array<Tick>(num_cells_ * num_agents_);
  published_ = arena.array<uint8_t>(num_flags);
  visible_ = arena.array<uint8_t>(num_flags);
  unseen_ = arena.array<int32_t>(num_agents_);
  stores_ = arena.array<uint32_t>(num_agents_);
  loads_ = arena.array<uint32_t>(num_agents_);
  unfenced_ = arena.array<uint8_t>(num_agents_);
  past_aborts_ = arena.array<uint8_t>(num_agents_ * s.num_ranks);
  stages_ = arena.array<Content>(num_agents_ * kStages);
  stage_load_ = arena.array<int32_t>(num_agents_ * kStages);
  arrived_ = arena.array<int32_t>(s.num_ranks * s.max_tasks);
  words_ = arena.words();
  canonical_bytes_ = arena.used();

  random = arena.array<uint64_t>(1);
  num_active_ = arena.array<int32_t>(1);
  num_pending_ = arena.array<int32_t>(1);
  num_messages_ = arena.array<int32_t>(1);
  active_ = arena.array<int32_t>(num_agents_ * max_operations_);
  pending_ = arena.array<int32_t>(num_flags);
  message_ = arena.array<int32_t>(num_flags * s.max_messages);
  operations_ = arena.array<Operation>(num_agents_ * max_operations_);
  operation_clocks_ = arena.array<Tick>(num_agents_ * max_operations_ * ticks_);
  // Last, so that what has been published is all that a copy of the state needs of them.
  max_published_ = num_flags * s.max_messages;
  message_bytes_ = static_cast<int32_t>((sizeof(Message) + ticks_ * sizeof(Tick) + 7) / 8 * 8);
  messages_ = arena.array<uint8_t>(static_cast<size_t>(max_published_) * message_bytes_);
}

int64_t World::tile_length(int32_t tile) const {
  size_t segment = 0;
  while (tile >= tile_begin_[segment + 1]) ++segment;
  const int64_t offset = (tile - tile_begin_[segment]) * shape.tile_bytes;
  return std::min(shape.tile_bytes, shape.segment_bytes[segment] - offset);
}

void World::violate(Property property, const char* format, ...) {
  if (violation != Property::kNone) return;
  violation = property;
  va_list values;
  va_start(values, format);
  std::vsnprintf(detail, sizeof detail, format, values);
  va_end(values);
}

uint32_t World::roll(uint32_t sides) {
  if (*random == 0) return 0;
  *random = *random * 6364136223846793005u + 1442695040888963407u;
  return static_cast<uint32_t>(*random >> 33) % sides;
}

void World::wake_rank(int32_t rank) {
  for (int32_t i = 0; i < shape.agents_per_rank; ++i) wake_agent(rank * shape.agents_per_rank + i);
}

void World::join(int32_t to, int32_t from) {
  ++clock(from)[from];
  join_ticks(clock(to), clock(from));
}

// ---- flags -------------------------------------------------------------------------------------

int32_t World::flag_index(int32_t rank, int64_t offset) {
  const bool inside = offset >= 0 && offset < shape.layout.slots_base;
  if (!inside || offset % 8 != 0 || flag_at_[offset / 8] < 0) {
    violate(Property::kStray, "no flag of rank %d is at %lld", rank,
            static_cast<long long>(offset));
    return 0;
  }
  return rank * flags_per_rank_ + flag_at_[offset / 8];
}

uint64_t World::observe(int32_t agent, int64_t offset) {
  const int32_t rank = rank_of(agent), flag = flag_index(rank, offset);
  const int32_t* const messages = message_ + flag * shape.max_messages;
  Tick* const known = clock(agent);
  for (int32_t i = published_[flag]; i > visible_[flag]; --i) {
    const Message& message = this->message(messages[i - 1]);
    if (known[message.writer] < message.program) continue;
    while (visible_[flag] < i) show(flag);
  }
  int32_t seen = visible_[flag];
  // A look at an abort flag can be as old as the oldest load that is not ordered before it.
  const int64_t abort = (offset - shape.layout.abort(0)) / 8;
  if (in_store && unfenced_[agent] && abort >= 0 && abort < shape.num_ranks &&
      offset == shape.layout.abort(static_cast<int32_t>(abort)))
    seen = past_aborts_[agent * shape.num_ranks + abort];
  if (seen == 0) return initial_[flag];
  const int32_t message = messages[seen - 1];
  join_ticks(known, message_clock(message));  // acquire
  return this->message(message).value;
}

void World::publish(int32_t agent, int32_t rank, int64_t offset, uint64_t value) {
  const int32_t flag = flag_index(rank, offset);
  CHECK(published_[flag] < shape.max_messages && *num_messages_ < max_published_);
  Tick* const known = clock(agent);
  const int32_t message = (*num_messages_)++;
  this->message(message) = {value, agent, flag, ++known[agent], 0};
  std::copy_n(known, ticks_, message_clock(message));  // release
  message_[flag * shape.max_messages + published_[flag]] = message;
  if (published_[flag]++ == visible_[flag]) pending_[(*num_pending_)++] = flag;
  ++unseen_[agent];
}

void World::show(int32_t flag) {
  const int32_t message = message_[flag * shape.max_messages + visible_[flag]];
  const int32_t writer = this->message(message).writer;
  this->message(message).shown = 1;
  if (--unseen_[writer] == 0) wake_agent(writer);
  if (++visible_[flag] == published_[flag]) {
    int32_t* const end = pending_ + *num_pending_;
    *std::find(pending_, end, flag) = end[-1];
    --*num_pending_;
  }
  rang = true;
  wake_rank(flag_rank(flag));
}

// A rank has stopped. Publishes of one step are one event here, but need not be in reality: of its
// latest messages that no rank has seen, any number were never sent.
void World::lose_peer_state(int32_t rank) {
  int32_t first = *num_messages_;  // of those that may be lost
  while (first > 0 && (rank_of(message(first - 1).writer) != rank || !message(first - 1).shown))
    --first;
  std::vector<int32_t> unseen;
  for (int32_t i = first; i < *num_messages_; ++i)
    if (rank_of(message(i).writer) == rank) unseen.push_back(i);
  const uint32_t kept = roll(static_cast<uint32_t>(unseen.size()) + 1);
  for (uint32_t i = static_cast<uint32_t>(unseen.size()); *random != 0 && i > kept; --i) {
    const int32_t flag = message(unseen[i - 1]).flag;
    --published_[flag];
    if (published_[flag] > visible_[flag]) continue;
    int32_t* const end = pending_ + *num_pending_;
    *std::find(pending_, end, flag) = end[-1];
    --*num_pending_;
  }
}

bool World::all_shown(int32_t writer_rank, int32_t to_rank) const {
  for (int32_t i = 0; i < *num_pending_; ++i) {
    const int32_t flag = pending_[i];
    if (flag_rank(flag) != to_rank) continue;
    for (int32_t m = visible_[flag]; m < published_[flag]; ++m)
      if (rank_of(message(message_[flag * shape.max_messages + m]).writer) == writer_rank)
        return false;
  }
  return true;
}

// ---- counters ----------------------------------------------------------------------------------

int32_t World::arrive(int32_t agent, int32_t* counter, int32_t n) {
  Tick* const shared = counter_clocks_ + (counter - arrived_) * ticks_;
  ++clock(agent)[agent];
  join_ticks(shared, clock(agent));  // release
  join_ticks(clock(agent), shared);  // acquire
  return *counter += n;
}

// Before a call's workers begin: the counters are new.
void World::reset_arrivals(int32_t rank) {
  std::fill_n(counter_clocks_ + rank * shape.max_tasks * ticks_, shape.max_tasks * ticks_, Tick{0});
}

// ---- bytes -------------------------------------------------------------------------------------

World::Place World::follow(int32_t agent, const uint8_t* address) {
  const auto number = reinterpret_cast<uint64_t>(address);
  const Place at{static_cast<Space>(number >> 44), static_cast<int32_t>(number >> 36 & 0xFF),
                 static_cast<int64_t>(number & 0xFFFFFFFFF)};
  if (at.rank >= shape.num_ranks) {
    stray(at, 0);
    return {at.space, 0, -1};  // which is nowhere
  }
  const int32_t own = rank_of(agent), call = call_now[own];
  if (at.rank != own && records[at.rank][call] != records[own][call])
    violate(Property::kMovedMismatch, "rank %d reaches into rank %d in call %d", own, at.rank,
            call);
  return at;
}

int32_t World::stray(const Place& at, int64_t bytes) {
  violate(Property::kStray, "%lld bytes at offset %lld of rank %d", static_cast<long long>(bytes),
          static_cast<long long>(at.offset), at.rank);
  return -1;
}

// The cell at an address, or -1: an access to it could not be right.
int32_t World::locate(int32_t agent, const uint8_t* address, int64_t bytes) {
  const Place place = follow(agent, address);
  const auto [space, rank, offset] = place;
  if (space == Space::kRow && offset == 0) return row_cell(rank);
  const int64_t table = offset - shape.layout.load_base;
  if (space == Space::kSymmetric && table >= 0 && table < shape.num_ranks * shape.row_bytes)
    return table_cell(rank, static_cast<int32_t>(table / shape.row_bytes));
  const bool slots = space == Space::kSymmetric;
  const auto& begin = slots ? shape.slot_offset : shape.region_offset;
  const int32_t count = slots ? shape.slots_per_rank : shape.max_local_experts;
  for (size_t i = 0; i < shape.segment_bytes.size(); ++i) {
    const int64_t inside = offset - begin[i];
    if (inside < 0 || inside >= count * shape.segment_bytes[i]) continue;
    const auto row = static_cast<int32_t>(inside / shape.segment_bytes[i]);
    const int64_t at = inside % shape.segment_bytes[i];
    const int32_t tile = tile_of(static_cast<int32_t>(i), at);
    if (at % shape.tile_bytes != 0 || bytes > tile_length(tile)) break;
    return slots ? slot_cell(rank, row, tile) : main_cell(rank, row, tile);
  }
  return stray(place, bytes);
}

const char* World::describe(int32_t cell) {
  static char text[80];
  const auto name = [&](const char* what, int32_t begin, int32_t per_rank, int32_t tiles) {
    const int32_t row = (cell - begin) / tiles;
    std::snprintf(text, sizeof text, "tile %d of %s %d of rank %d", (cell - begin) % tiles, what,
                  row % per_rank, row / per_rank);
  };
  const int32_t slots = shape.slots_per_rank, num_local = shape.max_local_experts;
  if (cell < main_weights_begin_)
    name("slot", 0, slots, num_tiles());
  else if (cell < tables_begin_)
    name("main", main_weights_begin_, num_local, num_tiles());
  else if (cell < slot_grads_begin_)
    std::snprintf(text, sizeof text, "load row %d", cell - tables_begin_);
  else if (cell < main_grads_begin_)
    name("the gradient in slot", slot_grads_begin_, slots, num_grad_tiles());
  else if (cell < sums_begin_)
    name("main gradient", main_grads_begin_, num_local, num_grad_tiles());
  else
    name("the sums of slot", sums_begin_, slots, sums_per_slot_);
  return text;
}

// Whether a cell is its caller's again after a failure. A rank that still loads it has to find
// out, and must not use what it got: the bytes show that.
bool World::was_freed(int32_t cell) const {
  if (is_main(cell))
    return freed[(cell - main_weights_begin_) / num_tiles() / shape.max_local_experts] != 0;
  if (cell < slot_grads_begin_ || cell >= main_grads_begin_) return false;
  return freed[(cell - slot_grads_begin_) / num_grad_tiles() / shape.slots_per_rank] != 0;
}

void World::check_read(int32_t cell, const Tick* known, int32_t agent, Tick number) {
  const Access& last = cells_[cell];
  if (known[num_agents_ + last.writer] < last.store) {
    if (was_freed(cell)) return;
    violate(is_main(cell) ? Property::kMainsChanged : Property::kReadEarly,
            "agent %d reads %s, and does not know of agent %d's store", agent, describe(cell),
            last.writer);
  }
  reads_[cell * num_agents_ + agent] = number;
}

void World::check_write(int32_t cell, const Tick* known) {
  const Access& last = cells_[cell];
  const Property property = is_main(cell) ? Property::kMainsChanged : Property::kWrittenEarly;
  if (known[num_agents_ + last.writer] < last.store)
    violate(property, "a store to %s does not come after agent %d's", describe(cell), last.writer);
  const Tick* const reads = reads_ + cell * num_agents_;
  for (int32_t i = 0; i < num_agents_; ++i)
    if (known[2 * num_agents_ + i] < reads[i])
      violate(property, "a store to %s does not come after agent %d's load", describe(cell), i);
}

World::Operation& World::begin_operation(int32_t agent, const Operation& op) {
  int32_t index = agent * max_operations_;
  while (operations_[index].state != Operation::kIdle) ++index;
  CHECK(index < (agent + 1) * max_operations_);
  std::copy_n(clock(agent), ticks_, operation_clocks_ + index * ticks_);
  active_[(*num_active_)++] = index;
  return operations_[index] = op;
}

int32_t World::begin_load(int32_t agent) {
  if (!unfenced_[agent]) {
    unfenced_[agent] = 1;
    for (int32_t r = 0; r < shape.num_ranks; ++r)
      past_aborts_[agent * shape.num_ranks + r] =
          visible_[flag_index(rank_of(agent), shape.layout.abort(r))];
  }
  return static_cast<int32_t>(++loads_[agent]);
}

void World::fetch(int32_t agent, uint32_t stage, const uint8_t* source, int64_t bytes) {
  const int32_t cell = locate(agent, source, bytes);
  if (cell < 0) return;
  const int32_t number = begin_load(agent);
  begin_operation(agent, {Operation::kLoading, static_cast<int16_t>(agent), cell, number, stage,
                          bytes, Content{}});
  stage_load_[agent * kStages + stage] = -number;
  stages_[agent * kStages + stage] = {};  // what was there is being written over
}

bool World::loaded(int32_t agent, uint32_t stage) {
  const int32_t load = stage_load_[agent * kStages + stage];
  if (load < 0) return false;
  Tick& known = clock(agent)[2 * num_agents_ + agent];
  known = std::max(known, static_cast<Tick>(load));
  return true;
}

void World::store(int32_t agent, uint32_t stage, const uint8_t* destination, int64_t bytes) {
  const int32_t cell = locate(agent, destination, bytes);
  if (cell < 0) return;
  const auto number = static_cast<int32_t>(++stores_[agent]);
  begin_operation(agent, {Operation::kIssued, static_cast<int16_t>(agent), cell, number, stage,
                          bytes, Content{}});
}

bool World::reusable(int32_t agent, uint32_t stage) const {
  for (int32_t i = 0; i < *num_active_; ++i) {
    const Operation& op = operations_[active_[i]];
    if (op.agent == agent && op.stage == stage && op.state == Operation::kIssued) return false;
  }
  return true;
}

bool World::delivered(int32_t agent, uint32_t ticket) const {
  for (int32_t i = 0; i < *num_active_; ++i) {
    const Operation& op = operations_[active_[i]];
    if (op.agent == agent && op.state != Operation::kLoading &&
        op.number <= static_cast<int32_t>(ticket))
      return false;
  }
  return true;
}

bool World::quiet(int32_t rank) const {
  for (int32_t i = 0; i < *num_active_; ++i)
    if (rank_of(operations_[active_[i]].agent) == rank) return false;
  return true;
}

// What is true, not what the agent believes.
void World::know_delivered(int32_t agent, uint32_t ticket) {
  auto number = static_cast<int32_t>(ticket);
  for (int32_t i = 0; i < *num_active_; ++i) {
    const Operation& op = operations_[active_[i]];
    if (op.agent == agent && op.state != Operation::kLoading)
      number = std::min(number, op.number - 1);
  }
  Tick& known = clock(agent)[num_agents_ + agent];
  known = std::max(known, static_cast<Tick>(number));
}

void World::advance(int32_t i) {
  const int32_t index = active_[i];
  Operation& op = operations_[index];
  const Tick* const known = operation_clocks_ + index * ticks_;
  wake_agent(op.agent);
  Content& stage = stages_[op.agent * kStages + op.stage];
  if (op.state == Operation::kIssued) {
    op.content = {stage.id, std::min(stage.bytes, op.bytes)};
    op.state = Operation::kRead;
    return;
  }
  if (op.state == Operation::kLoading) {
    check_read(op.cell, known, op.agent, static_cast<Tick>(op.number));
    const Content& source = cells_[op.cell].content;
    stage = {source.id, std::min(source.bytes, op.bytes)};
    stage_load_[op.agent * kStages + op.stage] = op.number;
  } else {
    check_write(op.cell, known);
    cells_[op.cell] = {op.content, op.agent, static_cast<Tick>(op.number)};
  }
  op.state = Operation::kIdle;
  active_[i] = active_[--*num_active_];
}

void World::write_now(int32_t agent, int32_t cell, Content content, bool checked) {
  Tick* const known = clock(agent);
  if (checked) check_write(cell, known);
  known[num_agents_ + agent] = static_cast<Tick>(++stores_[agent]);
  cells_[cell] = {content, agent, static_cast<Tick>(stores_[agent])};
}

Content World::read_now(int32_t agent, int32_t cell) {
  Tick* const known = clock(agent);
  const auto number = static_cast<Tick>(++loads_[agent]);
  check_read(cell, known, agent, number);
  known[2 * num_agents_ + agent] = number;
  return cells_[cell].content;
}

// ---- one number for the whole state ------------------------------------------------------------

uint64_t World::hash_ticks(uint64_t h, const Tick* ticks) const {
  for (int32_t i = 0; i < ticks_; ++i) h = (h ^ ticks[i]) * 0x100000001B3u;
  return uec::mix(h, 0);
}

uint64_t World::hash() const {
  uint64_t h = 0;
  for (size_t i = 0; i < canonical_bytes_ / 8; ++i) h = uec::mix(h, words_[i]);
  for (int32_t flag = 0; flag < shape.num_ranks * flags_per_rank_; ++flag)
    for (int32_t i = std::max(visible_[flag] - 1, 0); i < published_[flag]; ++i) {
      const int32_t message = message_[flag * shape.max_messages + i];
      h = uec::mix(uec::mix(h, this->message(message).value), this->message(message).writer);
      h = hash_ticks(h, message_clock(message));
    }
  uint64_t sum = 0;  // operations have no order
  for (int32_t i = 0; i < *num_active_; ++i) {
    const Operation& op = operations_[active_[i]];
    uint64_t one = uec::mix(op.agent * 4 + op.state, op.number);
    one = uec::mix(one, static_cast<uint64_t>(op.cell) << 8 | op.stage);
    one = uec::mix(uec::mix(one, op.content.id), op.content.bytes);
    sum += hash_ticks(one, operation_clocks_ + active_[i] * ticks_);
  }
  return uec::mix(h, sum);
}

}  // namespace sim
