// Executes PTX on the CPU, warp by warp, in a memory that checks what a device would only sometimes
// punish. docs/developing.md says what is modelled and what is not.
#pragma once

#include <array>
#include <bit>
#include <cstdint>
#include <cstring>
#include <deque>
#include <map>
#include <memory>
#include <mutex>
#include <queue>
#include <random>
#include <set>
#include <string>
#include <unordered_map>
#include <unordered_set>
#include <vector>

#include "api.h"
#include "clock.hpp"
#include "module.hpp"
#include "order.hpp"

namespace ptx_machine {

// ---- how a run is drawn -------------------------------------------------------------------------

struct Options {
  std::string ptx;       // $UEC_PTX
  std::string costs;     // $UEC_PTX_COSTS: a file of costs. With one the machine counts and keeps
                         // time, without one it checks orders under random schedules.
  uint64_t seed = 1;     // $UEC_PTX_SEED
  int64_t resident = 0;  // $UEC_PTX_RESIDENT: blocks of a grid at a time; 0: drawn for each grid
  uint32_t multiprocessors =
      0;              // $UEC_PTX_MULTIPROCESSORS of each rank, a block on each; 0: enough
  std::string holes;  // $UEC_PTX_HOLES: file:line,... that copy memory with holes
  static Options read();
  bool timed() const { return !costs.empty(); }
};

// What is wrong with a kernel, said once. The program ends with status 43 when it ends, with
// $UEC_PTX_STOP at once.
void violate(const std::string& what);
// What ends the program at once, with status 44.
[[noreturn]] void trap(const std::string& what);

// ---- a launch -----------------------------------------------------------------------------------

struct Warp;
struct Block;
struct Grid;

// Registers and memory of a function that a warp's lanes are in.
struct Frame {
  Frame(const Function& function, bool timed);
  const Function* function;
  std::vector<uint64_t> registers;   // [register][32]
  std::vector<uint32_t> predicates;  // a bit for each lane
  std::vector<uint8_t> area;         // [32][area_stride]
  uint8_t* local = nullptr;          // [32][local_stride]
  int32_t area_stride, local_stride;
  // Of registers, then predicates: when they are there, what for, and who makes them.
  struct Ready {
    uint64_t at = 0;
    uint32_t pc = 0;
    Wait wait = kWaitAlu;
  };
  std::vector<Ready> ready;
  uint64_t began = 0, instructions = 0;  // of the call that a warp is in
  std::unique_ptr<uint8_t[]> local_storage;

  Ready& ready_of(const Operand& o) {
    return ready[o.index + (o.kind == Kind::kPredicate ? function->num_registers : 0)];
  }
};

// A bulk copy, or a put over the network.
struct Copy {
  enum Form : uint8_t { kLoad, kStore, kShared, kPut, kSignal };
  uint64_t id;
  Form form;
  Warp* warp;
  int32_t lane;
  Block* to_block;  // of a load: whose shared memory, and mbarrier
  uint8_t *source, *destination;
  uint32_t bytes;
  uint64_t mbarrier = 0;
  std::vector<uint8_t> buffer;  // what has been read of a store's source
  uint32_t read_bytes = 0, written_bytes = 0;
  bool read = false, written = false;
  std::vector<Moment> read_seen, write_seen;  // by whom that waited for it
  uint64_t read_at = 0, written_at = 0;       // cycles
  uint32_t pc = 0;
  // Over the network.
  uint64_t pe = 0;
  std::vector<uint64_t> after;  // arrives behind these
  KnownPtr known;               // what comes before a signal

  bool is_load() const { return form == kLoad || form == kShared; }
  const std::vector<Moment>& seen(bool write) const {
    return !is_load() && write ? write_seen : read_seen;
  }
};

struct Mbarrier {
  uint32_t expected = 0, pending = 0;
  int64_t bytes = 0;
  uint64_t phase = 0;
  bool fenced = false;         // since its init
  uint32_t init_lane = 0;      // of all
  KnownPtr arriving, arrived;  // what comes before this phase's, the last phase's end
  std::vector<uint64_t> copying, copied;
};

// A strong store that nobody else sees yet.
struct Underway {
  uint64_t address, value;
  uint32_t bytes;
  KnownPtr known;
  Scope scope;
};

enum class Status : uint8_t { kRuns, kExited, kAtWarp, kAtBlock, kAtCluster, kAtBulk, kAtQuiet };

struct Lane {
  KnownPtr known;
  uint32_t step = 0;
  KnownPtr joined;  // last
  KnownPtr fenced;  // by its last fence
  Scope fence_scope = Scope::kNone;
  std::vector<std::pair<KnownPtr, Scope>> observed;  // relaxed: for its next fence
  std::vector<std::vector<uint64_t>> groups;         // of bulk stores, committed
  std::vector<uint64_t> open;                        // not yet
  uint32_t wait_groups = 0;
  bool wait_read = false;
  std::vector<std::pair<uint32_t, Frame*>> stack;  // where to return, and whose frame
};

struct Warp {
  Block* block = nullptr;
  uint32_t index = 0;  // of all
  uint32_t in_block = 0;
  uint32_t clock = 1;  // of order.hpp
  uint32_t live = 0;   // lanes
  uint32_t pc[32] = {};
  Frame* frame[32] = {};
  uint8_t depth[32] = {};
  Status status[32] = {};
  uint32_t sync_mask[32] = {};
  Lane lanes[32];
  std::vector<std::vector<std::unique_ptr<Frame>>> frames;  // by depth
  std::vector<uint64_t> puts;  // and signals over the network, until the warp has waited for them
  size_t fenced_puts = 0;      // of these, before its last fence
  uint32_t naps = 0;

  // Counts and times.
  uint64_t now = 0, began = 0;
  uint64_t stores_done = 0;
  Wait stores_wait = kWaitL2;
  uint32_t current = 0;  // pc
  uint64_t instructions = 0, lane_instructions = 0, slot_wait = 0;
  uint64_t waited[kWaits] = {}, trips[kWaits] = {};
  std::map<uint32_t, std::pair<uint64_t, uint64_t>> by_pc;  // cycles, times

  uint32_t lane_id(int lane) const { return index * 32 + static_cast<uint32_t>(lane); }
  Moment moment(int lane) const { return {lane_id(lane), clock, lanes[lane].step}; }
};

struct Cluster {
  std::vector<Block*> blocks;
  uint32_t arrived = 0;  // lanes, of this phase
  KnownPtr arriving, last;
  uint64_t phase = 0, at = 0;
};

struct Block {
  Grid* grid = nullptr;
  uint32_t x = 0, y = 0;
  uint32_t device = 0, id = 0;
  int32_t rank = 0;
  Cluster* cluster = nullptr;
  uint32_t cluster_rank = 0;
  uint8_t* shared = nullptr;
  int64_t shared_bytes = 0;
  std::vector<std::unique_ptr<Warp>> warps;
  std::unordered_map<uint64_t, Mbarrier> mbarriers;
  uint32_t live_lanes = 0, at_barrier = 0;
  uint64_t cluster_phase[32 * 32] = {};  // [thread] that it has arrived at
  bool ended = false;
  // Cycles.
  uint64_t slots[4] = {};
  std::unordered_set<uint64_t> l1;
  uint64_t barrier_at = 0, copier_free = 0;

  bool holds(const uint8_t* at) const { return at >= shared && at < shared + shared_bytes; }
};

struct Grid {
  std::string kernel;
  const Function* function = nullptr;
  uint32_t blocks_x = 1, blocks_y = 1, threads = 32;
  int64_t dynamic_shared = 0;
  int32_t first_rank = 0;
  bool is_beside = false;    // others on its device
  bool is_together = false;  // all its blocks begin at once
  std::vector<uint8_t> params;
  std::vector<std::unique_ptr<Block>> blocks;
  std::vector<std::unique_ptr<Cluster>> clusters;
  uint32_t resident = 0;  // blocks at a time
  size_t admitted = 0, finished = 0;
  uint32_t running = 0;
  bool done = false;
  std::vector<std::unique_ptr<Warp>> origins;  // [rank] stands for what its stream did before
};

// ---- the shadow of memory -----------------------------------------------------------------------

// Who has accessed a byte last: lane, its clock and step, pc, and how; or which copy.
class Access {
 public:
  enum How : uint64_t { kNone = 0, kWeak = 1, kStrong = 1, kCopy = 7 };  // kStrong + scope
  static constexpr uint32_t kMaxLanes = 1 << 16, kMaxClock = 1 << 20, kMaxStep = 1 << 8,
                            kMaxPc = 1 << 17;
  Access() = default;
  Access(const Moment& m, uint32_t pc, uint64_t how)
      : word_(uint64_t{m.lane} << 48 | uint64_t{m.clock % kMaxClock} << 28 |
              uint64_t{std::min(m.step, kMaxStep - 1)} << 20 | uint64_t{pc} << 3 | how) {}
  static Access of_copy(uint64_t id) {
    Access a;
    a.word_ = id << 3 | kCopy;
    return a;
  }
  static uint64_t how_of(Order order, Scope scope) {
    return order == Order::kWeak ? uint64_t{kWeak} : kStrong + static_cast<uint64_t>(scope);
  }

  bool none() const { return word_ == 0; }
  bool is_copy() const { return (word_ & 7) == kCopy; }
  bool is_strong() const { return !is_copy() && (word_ & 7) > kWeak; }
  Scope scope() const { return static_cast<Scope>((word_ & 7) - kStrong); }
  uint64_t copy() const { return word_ >> 3; }
  uint32_t pc() const { return static_cast<uint32_t>(word_ >> 3) % kMaxPc; }
  uint32_t warp() const { return static_cast<uint32_t>(word_ >> 48) / 32; }
  Moment moment() const {
    return {static_cast<uint32_t>(word_ >> 48), static_cast<uint32_t>(word_ >> 28) % kMaxClock,
            static_cast<uint32_t>(word_ >> 20) % kMaxStep};
  }
  bool same_lane(const Access& other) const {
    return is_copy() || other.is_copy() ? word_ == other.word_ : word_ >> 48 == other.word_ >> 48;
  }
  bool operator==(const Access&) const = default;

 private:
  uint64_t word_ = 0;
};

// The last two that have read a byte: if one of them is who writes next, the other is not lost.
using Readers = std::array<Access, 2>;

class Shadow {
 public:
  static constexpr uint64_t kPage = 4096;
  struct Page {
    Access write[kPage];
    Readers readers[kPage];

    void note_read(uint64_t at, const Access& access) {
      if (!readers[at][0].same_lane(access)) readers[at][1] = readers[at][0];
      readers[at][0] = access;
    }
  };
  Page& page(uint64_t address) {
    const uint64_t key = address / kPage;
    if (key != key_) {
      auto& page = pages_[key];
      if (page == nullptr) page = std::make_unique<Page>();
      key_ = key;
      page_ = page.get();
    }
    return *page_;
  }
  Page* find(uint64_t address) {
    const auto it = pages_.find(address / kPage);
    return it == pages_.end() ? nullptr : it->second.get();
  }
  // f(page, first, end, address of first) for the parts of a range.
  template <class F>
  void each(uint64_t address, uint64_t bytes, F&& f) {
    for (const uint64_t end = address + bytes; address < end;) {
      const uint64_t at = address % kPage, n = std::min(kPage - at, end - address);
      f(page(address), at, at + n, address);
      address += n;
    }
  }
  void clear() {
    pages_.clear();
    key_ = ~uint64_t{0};
  }

 private:
  std::unordered_map<uint64_t, std::unique_ptr<Page>> pages_;
  uint64_t key_ = ~uint64_t{0};
  Page* page_ = nullptr;
};

// ---- the machine --------------------------------------------------------------------------------

using Values = std::array<uint64_t, 32>;  // of a warp's lanes

template <class F>
void each_lane(uint32_t mask, F&& f) {
  for (; mask != 0; mask &= mask - 1) f(std::countr_zero(mask));
}
inline uint64_t mask_of(int bytes) {
  return bytes >= 8 ? ~uint64_t{0} : (uint64_t{1} << (8 * bytes)) - 1;
}
inline int64_t sign_extend(uint64_t value, int bytes) {
  const int shift = 64 - 8 * bytes;
  return static_cast<int64_t>(value << shift) >> shift;
}

class Machine {
 public:
  static Machine& instance();
  static constexpr uint64_t kWindow = 1024;  // of shared memory; what is below is the system's

  Grid* begin(const PtxLaunch& launch);
  bool advance(Grid* grid);
  void add_memory(const void* base, int64_t bytes, int32_t rank);
  void add_results(const void* base, int64_t bytes, int32_t rank, const int32_t* failed);
  void set_symmetric(uint8_t* const* bases, int32_t num_pes, int64_t bytes);
  void forget();
  const char* report() const { return report_.c_str(); }

 private:
  Machine();

  // ---- machine.cc: grids and turns
  void order_behind_stream(Grid& grid);
  bool has_room(uint32_t device, size_t blocks);
  void admit(Grid& grid);
  void admit_block(Block& block);
  void add_warp(Block& block, uint32_t in_block);
  Frame* frame(Warp& w, uint32_t depth, const Function& function);
  void slice();
  void slice_in_time();
  bool take_turn(Warp& w, int budget);  // whether it has moved
  void end_of_warp(Warp& w);
  void end_of_block(Block& block);
  void check_results(Grid& grid);
  void clear();
  [[noreturn]] void stuck(const char* what);
  std::string state() const;
  std::string where(uint32_t pc) const { return module_.where(static_cast<int32_t>(pc)); }
  std::string who(const Warp& w, int lane) const;
  uint32_t random(uint32_t n) { return static_cast<uint32_t>((random_() >> 11) % n); }

  // ---- warp.cc: control, and lanes that wait for each other
  bool run(Warp& w, int budget);
  void synchronise(Warp& w, uint32_t lanes, uint32_t pc);
  void shuffle(Warp& w, uint32_t lanes, uint32_t pc);
  void meet_in_warp(Warp& w);
  void meet_in_block(Block& block, Warp& current);
  void exit_lane(Warp& w, int lane);
  void call(Warp& w, Frame& f, const Instruction& i, uint32_t lanes, uint32_t pc);
  void leave(Warp& w, Frame& f, const Instruction& i, uint32_t lanes);
  void arrive_at_cluster(Warp& w, const Instruction& i, uint32_t lanes);
  bool pass_cluster(Warp& w, int lane);

  // ---- arithmetic.cc
  void compute(Warp& w, Frame& f, const Instruction& i, uint32_t lanes, uint32_t pc);
  uint64_t value(Warp& w, int lane, const Operand& o, uint32_t pc);
  // Of all lanes in `f`, at once: most of a program's time goes here.
  Values values(Warp& w, Frame& f, uint32_t lanes, const Operand& o, uint32_t pc);
  uint64_t special(Warp& w, int lane, uint64_t which, uint32_t pc);
  static void put(Frame& f, int lane, const Operand& o, uint64_t v);
  uint64_t address_of(Warp& w, int lane, const Instruction& i, uint32_t pc) {
    return value(w, lane, i.base, pc) + static_cast<uint64_t>(i.offset);
  }

  // ---- memory.cc: loads, stores, atomics
  struct Located {
    uint8_t* at;
    Block* block;  // whose shared memory it is; null: global
    bool is_private;
  };
  Located locate(Warp& w, int lane, const Instruction& i, uint32_t bytes, uint32_t pc);
  Block* shared_owner(const Warp& w, const uint8_t* at) const;
  uint8_t* in_window(const Warp& w, int lane, uint64_t address, uint64_t bytes, uint32_t pc,
                     Block** owner) const;
  void check_bounds(const Warp& w, int lane, const uint8_t* at, uint64_t bytes, uint32_t pc) const;
  void load(Warp& w, Frame& f, const Instruction& i, uint32_t lanes, uint32_t pc, uint64_t at);
  void store(Warp& w, Frame& f, const Instruction& i, uint32_t lanes, uint32_t pc, uint64_t at);
  void atomic(Warp& w, Frame& f, const Instruction& i, uint32_t lanes, uint32_t pc, uint64_t at);
  void fence(Warp& w, const Instruction& i, uint32_t lanes);
  void retire(const Warp& w, const Underway& store);
  void retire_one();
  void retire_all(Warp& w, int lane);
  void retire_overlapping(Warp& w, int lane, uint64_t address, uint32_t bytes);
  void note_change(const void* at, uint64_t value, uint32_t bytes) {
    if (std::memcmp(at, &value, bytes) != 0) changed_at_ = steps_;
  }

  // ---- order.cc: who knows what, and races
  KnownPtr publish(Warp& w, int lane);
  void join(Warp& w, int lane, const KnownPtr& known, bool from_other_block = false);
  void join_lanes(Warp& w, uint32_t lanes);
  void join_block(Block& block);
  void proxy_fence(Warp& w, int lane, Space space);
  void set_release(const Warp& w, uint64_t address, const KnownPtr& known, Scope scope);
  void acquire(Warp& w, int lane, uint64_t address, Scope scope, bool now);
  static bool covers(Scope scope, const Block& a, const Block& b);
  bool knows(const Warp& w, int lane, const Moment& m, View view) const;
  bool ordered(const Access& before, bool wrote, const Warp& w, int lane, const Access& now,
               View view);
  void access(const Warp& w, int lane, uint64_t address, uint32_t bytes, bool writes, uint64_t how,
              uint32_t pc, bool shared);
  void access_by_copy(const Warp& w, int lane, uint64_t address, uint32_t bytes, bool writes,
                      const Copy& copy, View view);
  void race(const char* what, const Access& before, const Warp& w, int lane, uint32_t pc,
            uint64_t address);
  void note_uninitialised(uint32_t pc);

  // ---- bulk.cc: the async proxy
  Copy& copy(uint64_t id) { return *copies_[id]; }
  Copy& add_copy(Copy::Form form, Warp& w, int lane, uint8_t* source, uint8_t* destination,
                 uint32_t bytes, uint32_t pc);
  void bulk(Warp& w, const Instruction& i, uint32_t lanes, uint32_t pc, uint64_t at);
  void bulk_of_lane(Warp& w, const Instruction& i, int lane, uint32_t pc, uint64_t at);
  void time_copy(Copy& c, uint64_t at);
  bool bulk_wait(Warp& w, const Instruction& i, uint32_t lanes, uint32_t pc);
  bool finish_bulk_wait(Warp& w, int lane);
  template <class F>
  void each_awaited(Lane& lane, F&& f) {
    for (size_t g = 0; g + lane.wait_groups < lane.groups.size(); ++g)
      for (const uint64_t id : lane.groups[g]) f(copy(id));
  }
  void mbarrier(Warp& w, Frame& f, const Instruction& i, uint32_t lanes, uint32_t pc);
  Mbarrier& find_mbarrier(Block& block, uint64_t at, const Warp& w, int lane, uint32_t pc);
  void observe_phase(Warp& w, int lane, Mbarrier& barrier);
  void fence_mbarriers(Warp& w, uint32_t lanes);
  void end_phase(Mbarrier& barrier);
  void move_one();
  void read_some(Copy& c, bool all);
  void write_some(Copy& c, bool all);
  void complete(Copy& c);
  void remove_flying(const Copy& c) { std::erase(flying_, &c); }

  // ---- network.cc: NVSHMEM's device functions
  struct NetworkCall {
    Warp& w;
    Frame& f;
    const Instruction& i;
    uint32_t lanes, pc;
  };
  struct NetworkFunction {
    void (Machine::*run)(const NetworkCall& c);
    bool of_warp;  // all lanes call it together
  };
  static const NetworkFunction* network_function(const std::string& name);
  uint64_t argument(const NetworkCall& c, int lane, size_t k) const;
  void give_back(const NetworkCall& c, int lane, uint64_t v) const;
  uint8_t* symmetric(const NetworkCall& c, uint64_t address, uint64_t pe) const;
  void net_put(const NetworkCall& c);
  void net_signal(const NetworkCall& c);
  void net_fence(const NetworkCall& c);
  void net_quiet(const NetworkCall& c);
  void net_wait_until(const NetworkCall& c);
  Copy& send_signal(const NetworkCall& c, int lane, uint64_t flag, uint64_t v, uint64_t pe);
  std::vector<uint64_t> fenced_puts(const Warp& w, uint64_t pe);
  bool is_quiet(Warp& w, int lane);
  void arrive(Copy& c);

  // ---- timing.cc
  bool has_operands(Warp& w, Frame& f, const Instruction& i);
  uint64_t issue(Warp& w, const Instruction& i);
  uint64_t latency(const Instruction& i) const;
  void result(Frame& f, const Instruction& i, uint64_t at, Wait wait);
  void wait_until(Warp& w, uint64_t at, Wait wait);
  void wait_for_stores(Warp& w, Scope scope);
  Wait place_of(const Block& block, uint64_t address) const;
  int32_t owner_of(uint64_t address) const;
  uint64_t over_link(const Block& block, uint64_t address, uint32_t bytes, bool inwards,
                     uint64_t at);
  void apply_events();
  std::string report_of(const Grid& grid) const;

  const Options options_;
  const Module module_;
  Costs costs_;
  std::mutex mutex_;
  std::mt19937_64 random_;

  std::vector<std::unique_ptr<Grid>> grids_, ended_;
  std::vector<Warp*> warps_, live_;
  Shadow shadow_;
  struct Release {
    KnownPtr known;
    Scope scope;
    const Block* block;
  };
  std::unordered_map<uint64_t, Release> releases_;  // by address
  std::unordered_map<uint64_t, uint64_t> signals_;  // by flag: the last that arrived
  std::vector<std::unique_ptr<Copy>> copies_;
  std::vector<Copy*> flying_;
  std::map<uint32_t, std::deque<Underway>> underway_;  // by lane, oldest first
  std::vector<std::unique_ptr<uint8_t, decltype(&std::free)>> old_shared_;

  std::map<uint64_t, std::pair<int64_t, int32_t>> memory_;  // begin: bytes, rank
  struct Results {
    uint64_t base;
    int64_t bytes;
    int32_t rank;
    const int32_t* failed;
  };
  std::vector<Results> results_;
  std::vector<uint8_t*> symmetric_;
  int64_t symmetric_bytes_ = 0;

  uint64_t steps_ = 0, changed_at_ = 0, idle_ = 0, elapsed_ns_ = 0;
  uint32_t num_blocks_ = 0;
  std::map<uint32_t, uint32_t> busy_;  // multiprocessors, by device

  // Cycles.
  struct Due {
    uint64_t at = 0, number = 0;
    Warp* warp = nullptr;  // takes its turn; or
    Copy* copy = nullptr;  // has read, or arrived; or
    bool arrives = false;
    uint64_t address = 0, value = 0;  // a store arrives
    uint32_t bytes = 0;
    bool operator<(const Due& other) const {
      return at != other.at ? at > other.at : number > other.number;
    }
  };
  std::priority_queue<Due> turns_, events_;
  uint64_t now_ = 0, due_ = 0;
  std::unordered_map<uint64_t, uint64_t> atomic_free_;
  std::map<std::pair<int32_t, bool>, uint64_t> link_free_;  // by rank and direction
  struct Atomics {
    uint64_t times = 0, first = 0, last = 0;
  };
  std::map<std::pair<uint32_t, const char*>, Atomics> atomics_;  // by place, and how they ended
  struct Calls {
    uint64_t times = 0, cycles = 0, instructions = 0;
  };
  std::map<std::string, Calls> calls_;  // by function
  std::string report_;
};

}  // namespace ptx_machine
