// A hostile memory: every store that is not yet known to be delivered may still be anywhere.
//
// Bytes move by operations that complete whenever the schedule says: a load, and for each
// destination of a store apart, the reading of its source and its arrival. A tile's bytes are
// represented by whose payload they are and how many of them there are.
//
// Flags are stored at once for their writer and become visible to their reader whenever the
// schedule says, but no later than the reader acquires something that was published after them.
//
// A step of a worker is one event, and its two sides share a clock. What can happen between the
// loads and stores of one step is for ThreadSanitizer (tests/host).
//
// Order is kept by vector clocks: an access is checked against those that it must come after by
// what its thread knows, not by when it happened. So "read before it was delivered" is found in
// every schedule that has the two accesses, also where the bytes happened to be there already.
#pragma once

#include <algorithm>
#include <cstdarg>
#include <cstdio>
#include <vector>

#include "core/base/team.hpp"
#include "core/transfer/layout.hpp"
#include "core/transfer/protocol.hpp"
#include "core/transfer/ring.hpp"
#include "simulation/arena.hpp"

namespace sim {

enum class Property : int32_t {
  kNone,
  kReadEarly,      // read before it was delivered
  kWrittenEarly,   // written before it was open
  kMainsChanged,   // main weights changed while they were being read
  kWrongBytes,     // a finished call left something else than the expert's bytes of this epoch
  kTouched,        // an empty slot was written to
  kStray,          // an access outside slots, main weights and load rows
  kStuck,          // a deadlock or a lost wake-up
  kFaulted,        // a call failed for no reason
  kMissedFault,    // a call succeeded that could not have
  kWrongReport,    // a failed call names another fault or another rank than the right one
  kMovedMismatch,  // bytes moved between ranks that had made different calls
};

inline const char* name_of(Property property) {
  static constexpr const char* kNames[] = {"none",
                                           "read before it was delivered",
                                           "written before it was open",
                                           "main weights changed while read",
                                           "wrong bytes",
                                           "an empty slot was touched",
                                           "a stray access",
                                           "deadlock or lost wake-up",
                                           "failed for no reason",
                                           "succeeded where it could not",
                                           "wrong report",
                                           "moved in a mismatch"};
  return kNames[static_cast<int>(property)];
}

using Tick = uint16_t;

// What is in a tile's place: `bytes` bytes of payload `id`. Of gradients, whose types differ from
// place to place, `bytes` counts elements.
struct Content {
  uint64_t id = 0;
  int64_t bytes = 0;
  bool operator==(const Content&) const = default;
};

// Addresses are numbers that only the world can dereference.
enum class Space : uint64_t { kSymmetric = 1, kMains = 2, kRow = 3, kMainGrads = 4 };

inline uint8_t* base_of(Space space, int32_t rank) {
  return reinterpret_cast<uint8_t*>(static_cast<uint64_t>(space) << 44 | static_cast<uint64_t>(rank)
                                                                             << 36);
}

struct Shape {
  int32_t num_ranks, num_experts, slots_per_rank, max_local_experts;
  int32_t agents_per_rank;  // workers, and last the rank's own thread
  int64_t tile_bytes;
  std::vector<int64_t> segment_bytes, slot_offset, region_offset;
  // Types of slot gradients and of main gradients. Empty: slots hold no gradients.
  std::vector<int64_t> grad_bytes, grad_offset, main_grad_offset;
  std::vector<uec::GradType> grad_type, main_grad_type;
  uec::SymmetricLayout layout;
  int32_t max_messages;  // ever published to one flag
  int32_t max_tasks;     // of a rank's worklist; reductions are tasks
  int64_t row_bytes;
};

class World {
 public:
  static constexpr uint32_t kStages = 8;

  struct Operation {
    enum State : int16_t { kIdle, kLoading, kIssued, kRead } state;
    int16_t agent;
    int32_t cell;
    int32_t number;  // among its agent's loads or stores
    uint32_t stage;
    int64_t bytes;
    Content content;
  };

  World(const Shape& shape, Arena& arena);

  // ---- topology of agents and places
  int32_t num_agents() const { return num_agents_; }
  int32_t rank_of(int32_t agent) const { return agent / shape.agents_per_rank; }
  int32_t num_tiles() const { return tile_begin_.back(); }
  int32_t tile_of(int32_t segment, int64_t offset) const {
    return tile_begin_[segment] + static_cast<int32_t>(offset / shape.tile_bytes);
  }
  int64_t tile_length(int32_t tile) const;
  int32_t slot_cell(int32_t rank, int32_t slot, int32_t tile) const {
    return (rank * shape.slots_per_rank + slot) * num_tiles() + tile;
  }
  int32_t main_cell(int32_t rank, int32_t main, int32_t tile) const {
    return main_weights_begin_ + (rank * shape.max_local_experts + main) * num_tiles() + tile;
  }
  int32_t table_cell(int32_t rank, int32_t writer) const {
    return tables_begin_ + rank * shape.num_ranks + writer;
  }
  int32_t row_cell(int32_t rank) const { return rows_begin_ + rank; }
  int32_t num_grad_tiles() const { return grad_tile_begin_.back(); }
  int64_t grad_elements(int32_t tile) const;
  uec::GradType grad_type(int32_t tile) const { return shape.grad_type[grad_segment(tile)]; }
  int32_t slot_grad_cell(int32_t rank, int32_t slot, int32_t tile) const {
    return slot_grads_begin_ + (rank * shape.slots_per_rank + slot) * num_grad_tiles() + tile;
  }
  int32_t main_grad_cell(int32_t rank, int32_t main, int32_t tile) const {
    return main_grads_begin_ + (rank * shape.max_local_experts + main) * num_grad_tiles() + tile;
  }

  // ---- what an agent does
  uint64_t observe(int32_t agent, int64_t offset);
  void publish(int32_t agent, int32_t rank, int64_t offset, uint64_t value);
  bool flags_delivered(int32_t agent) const { return unseen_[agent] == 0; }
  bool peer_gone(int32_t agent, int32_t rank) const {
    return gone[rank_of(agent) * shape.num_ranks + rank] != 0;
  }
  int32_t arrive(int32_t agent, int32_t* counter, int32_t n);
  void reset_arrivals(int32_t rank);

  void fetch(int32_t agent, uint32_t stage, const uint8_t* source, int64_t bytes);
  bool loaded(int32_t agent, uint32_t stage);
  void store(int32_t agent, uint32_t stage, const uint8_t* destination, int64_t bytes);
  bool reusable(int32_t agent, uint32_t stage) const;
  uint32_t stores_issued(int32_t agent) const { return stores_[agent]; }
  bool delivered(int32_t agent, uint32_t ticket) const;
  void know_delivered(int32_t agent, uint32_t ticket);
  bool delivered_all(int32_t agent) const { return delivered(agent, stores_[agent]); }
  // Whether it does not yet know that all its stores are delivered.
  bool holds_stores(int32_t agent) const {
    return clock(agent)[num_agents_ + agent] < stores_[agent];
  }
  bool quiet(int32_t rank) const;  // nothing of its agents is under way
  void loads_complete(int32_t agent) { unfenced_[agent] = 0; }

  // For reductions. What is read reaches the agent at once; what is stored arrives later.
  Content read_gradient(int32_t agent, const uint8_t* source, int64_t elements, uec::GradType type);
  void store_gradient(int32_t agent, const uint8_t* destination, Content content,
                      uec::GradType type);
  void clear_gradient(int32_t agent, const uint8_t* destination, int64_t bytes);
  static constexpr uint64_t kCleared = 0xC1EA;

  // The rank's own thread, before a call and after it.
  void write_now(int32_t agent, int32_t cell, Content content, bool checked = true);
  Content read_now(int32_t agent, int32_t cell);
  // `to` happens after all that `from` has done.
  void join(int32_t to, int32_t from);

  // ---- what the memory does
  int32_t num_operations() const { return *num_active_; }
  const Operation& operation(int32_t i) const { return operations_[active_[i]]; }
  void advance(int32_t i);  // the load, the reading of a store's source, or its arrival
  int32_t num_pending_flags() const { return *num_pending_; }
  int32_t pending_flag(int32_t i) const { return pending_[i]; }
  int32_t flag_rank(int32_t flag) const { return flag / flags_per_rank_; }
  void show(int32_t flag);  // its oldest message that is not visible yet
  void lose_peer_state(int32_t rank);
  bool all_shown(int32_t writer_rank, int32_t to_rank) const;

  uint32_t roll(uint32_t sides);  // dice inside a step; 0 where none are thrown

  // ---- counters and sleepers that the ranks' programs use
  int32_t* arrived(int32_t rank) const { return arrived_ + rank * shape.max_tasks; }
  void wake_agent(int32_t agent) { asleep[2 * agent] = asleep[2 * agent + 1] = 0; }
  void wake_rank(int32_t rank);

  void violate(Property property, const char* format, ...) __attribute__((format(printf, 3, 4)));
  uint64_t hash() const;
  // The arena's bytes that matter, if nothing was taken from it after the world.
  size_t live_bytes() const {
    const auto* const begin = reinterpret_cast<const uint8_t*>(words_);
    return static_cast<size_t>(messages_ - begin) +
           static_cast<size_t>(*num_messages_) * message_bytes_;
  }
  // Puts a value into a flag of every rank, from before the first call.
  void leave_behind(int32_t rank, int64_t offset, uint64_t value) {
    initial_[flag_index(rank, offset)] = value;
  }

  const Shape shape;
  uint8_t* asleep;  // [agents][2]
  uint8_t* gone;    // [observer][rank]
  uint8_t* freed;   // [ranks] its caller has its memory back after a failure
  // What each rank calls, and which of its calls it is in: bytes move only between equal ones.
  std::vector<std::vector<uint64_t>> records;  // [ranks][calls]
  int32_t* call_now;                           // [ranks]
  uint64_t* random;       // state of the dice inside a step; 0: none are thrown
  bool in_store = false;  // an agent is in a store step: its loads may be late, see observe()
  bool rang = false;      // a flag has become visible since the present step began
  Property violation = Property::kNone;
  char detail[200] = {};

 private:
  struct Message {
    uint64_t value;
    int32_t writer, flag;
    Tick program, shown;
  };
  struct Access {
    Content content;
    int32_t writer;
    Tick store;
  };

  int32_t flag_index(int32_t rank, int64_t offset);
  struct Place {
    Space space;
    int32_t rank;
    int64_t offset;
  };
  Place follow(int32_t agent, const uint8_t* address);
  int32_t locate(int32_t agent, const uint8_t* address, int64_t bytes);
  int32_t locate_gradient(int32_t agent, const uint8_t* address, int64_t bytes,
                          const uec::GradType* type);
  int32_t stray(const Place& at, int64_t bytes);
  const char* describe(int32_t cell);
  bool is_main(int32_t cell) const { return cell >= main_weights_begin_ && cell < tables_begin_; }
  bool was_freed(int32_t cell) const;
  int32_t grad_segment(int32_t tile) const;
  int32_t begin_load(int32_t agent);  // returns its number
  Message& message(int32_t i) const {
    return *reinterpret_cast<Message*>(messages_ + i * message_bytes_);
  }
  Tick* message_clock(int32_t i) const {
    return reinterpret_cast<Tick*>(messages_ + i * message_bytes_ + sizeof(Message));
  }
  Tick* clock(int32_t agent) const { return clocks_ + agent * ticks_; }
  void join_ticks(Tick* to, const Tick* from) const {
    for (int32_t i = 0; i < ticks_; ++i) to[i] = std::max(to[i], from[i]);
  }
  void check_read(int32_t cell, const Tick* known, int32_t agent, Tick number);
  void check_write(int32_t cell, const Tick* known);
  Operation& begin_operation(int32_t agent, const Operation& op);
  uint64_t hash_ticks(uint64_t h, const Tick* ticks) const;

  int32_t num_agents_, ticks_, flags_per_rank_, max_operations_, max_published_, message_bytes_;
  int32_t main_weights_begin_, tables_begin_, rows_begin_;
  int32_t slot_grads_begin_, main_grads_begin_, sums_begin_, num_cells_;
  int32_t sums_per_slot_;                 // cells
  std::vector<int32_t> tile_begin_;       // [segments + 1]
  std::vector<int32_t> grad_tile_begin_;  // [gradients' segments + 1]
  std::vector<int32_t> flag_at_;          // [words of a rank's flags] its number, or -1
  std::vector<uint64_t> initial_;         // [flags]

  // A clock is [3][agents]: of each agent, how much of its program, how many of its stores as
  // delivered, and how many of its loads as done are known.
  Tick* clocks_;          // [agents][ticks]
  Tick* counter_clocks_;  // [ranks][tasks][ticks] arrival counters
  Access* cells_;         // [cells]
  Tick* reads_;           // [cells][agents] last load
  uint8_t* published_;    // [flags]
  uint8_t* visible_;      // [flags]
  int32_t* unseen_;       // [agents] messages that are not visible yet
  uint32_t* stores_;      // [agents]
  uint32_t* loads_;       // [agents]
  uint8_t* unfenced_;     // [agents] has loads that loads_complete() has not ordered
  uint8_t* past_aborts_;  // [agents][ranks] abort flags as the oldest such load saw them
  Content* stages_;       // [agents][kStages]
  int32_t* stage_load_;   // [agents][kStages] number of the load; negative: under way
  int32_t* arrived_;      // [ranks][tasks]
  // Above this line the place of a thing says what it is; below, order is an accident.
  size_t canonical_bytes_;
  const uint64_t* words_;
  int32_t* num_active_;
  int32_t* num_pending_;
  int32_t* num_messages_;
  int32_t* active_;         // operations
  int32_t* pending_;        // flags
  int32_t* message_;        // [flags][max_messages] into messages_
  Operation* operations_;   // [agents][max_operations]
  Tick* operation_clocks_;  // [agents][max_operations][ticks]
  uint8_t* messages_;       // [num_messages] each followed by its clock
};

// The core's policies over a world.
class SimMemory {
 public:
  using Team = uec::SingleThread;

  SimMemory(World& world, int32_t agent) : world_(world), agent_(agent) {}

  uint64_t observe(int64_t offset) { return world_.observe(agent_, offset); }
  void publish(uec::Delivered, int32_t rank, int64_t offset, uint64_t value) {
    world_.publish(agent_, rank, offset, value);
  }
  bool flags_delivered() { return world_.flags_delivered(agent_); }
  bool peer_gone(int32_t rank) { return world_.peer_gone(agent_, rank); }
  int32_t arrive(uec::Delivered, int32_t* counter, int32_t n) {
    return world_.arrive(agent_, counter, n);
  }

 private:
  World& world_;
  int32_t agent_;
};

class SimMover : public uec::DeliveryPolicy, public uec::LocalRing<4> {
 public:
  SimMover(World& world, int32_t agent, bool eager) : world_(world), agent_(agent), eager_(eager) {}

  void fetch(uint32_t k, const uec::Stage& stage, const uint8_t* source) {
    describe(k, stage);
    if (source != nullptr) world_.fetch(agent_, k % kStages, source, stage.span.bytes);
  }
  bool loaded(uint32_t k) {
    return described(k) && (stage(k).ends_stream() || world_.loaded(agent_, k % kStages));
  }
  void store(uint32_t k, uint8_t* destination, int64_t bytes) {
    world_.store(agent_, k % kStages, destination, bytes);
  }
  bool reusable(uint32_t k) { return world_.reusable(agent_, k % kStages); }
  uint32_t commit_and_wait_source(uint32_t) { return world_.stores_issued(agent_); }

  template <class F>
  bool wait_delivered(uint32_t ticket, bool may_block, F&& then) {
    if (!may_block && !eager_) return false;  // as a mover that only looks when it has to
    if (!world_.delivered(agent_, ticket)) return false;
    world_.know_delivered(agent_, ticket);
    then(delivered());
    return true;
  }

  void loads_complete() { world_.loads_complete(agent_); }

 private:
  World& world_;
  int32_t agent_;
  bool eager_;
};

}  // namespace sim
