// Grids, and whose turn it is.
#include "machine.hpp"

#include <algorithm>
#include <cstdio>
#include <cstdlib>

namespace ptx_machine {
namespace {

constexpr int kStuckSteps = 20'000'000;  // without a change of memory
constexpr int kStuckTurns = 200'000;     // in which no warp could move
constexpr int kTurnsInSlice = 20'000;

int g_violations = 0;
std::map<std::string, int> g_seen;

std::string variable(const char* name) {
  const char* const value = std::getenv(name);
  return value == nullptr ? "" : value;
}

int64_t number(const char* name, int64_t otherwise) {
  const std::string text = variable(name);
  if (text.empty()) return otherwise;
  char* end = nullptr;
  const int64_t value = std::strtoll(text.c_str(), &end, 0);
  if (*end != 0) {
    std::fprintf(stderr, "%s=%s is not a number\n", name, text.c_str());
    std::exit(2);
  }
  return value;
}

// When the program ends, also by exit().
struct AtEnd {
  AtEnd() {
    std::atexit([] {
      if (g_violations == 0) return;
      std::fprintf(stderr, "ptx machine: %d violations of %zu kinds\n", g_violations,
                   g_seen.size());
      std::fflush(nullptr);
      std::_Exit(43);
    });
  }
} g_at_end;

}  // namespace

void violate(const std::string& what) {
  ++g_violations;
  if (g_seen[what]++ != 0 || g_seen.size() > 20) return;
  std::fprintf(stderr, "ptx machine: VIOLATION: %s\n", what.c_str());
  std::fflush(stderr);
  if (!variable("UEC_PTX_STOP").empty()) std::_Exit(43);
}

void trap(const std::string& what) {
  std::fprintf(stderr, "ptx machine: TRAP: %s\n", what.c_str());
  std::fflush(nullptr);
  std::_Exit(44);
}

Options Options::read() {
  Options options;
  options.ptx = variable("UEC_PTX");
  options.costs = variable("UEC_PTX_COSTS");
  options.seed = static_cast<uint64_t>(number("UEC_PTX_SEED", 1));
  options.resident = number("UEC_PTX_RESIDENT", 0);
  options.multiprocessors = static_cast<uint32_t>(number("UEC_PTX_MULTIPROCESSORS", 0));
  options.holes = variable("UEC_PTX_HOLES");
  return options;
}

Frame::Frame(const Function& f, bool timed)
    : function(&f),
      registers((f.num_registers + 1) * 32),
      predicates(f.num_predicates + 1),
      area(32 * (f.area_bytes + 16)),
      area_stride(f.area_bytes + 16),
      local_stride((f.local_bytes + 15) / 16 * 16 + 16),
      local_storage(new uint8_t[32 * local_stride + 16]) {
  local = local_storage.get() + 15;
  local -= reinterpret_cast<uintptr_t>(local) % 16;
  if (timed) ready.resize(f.num_registers + f.num_predicates + 2);
}

Machine& Machine::instance() {
  static Machine machine;
  return machine;
}

Machine::Machine()
    : options_(Options::read()), module_(parse(options_.ptx)), random_(options_.seed * 7919 + 13) {
  if (options_.timed()) costs_ = Costs::read(options_.costs);
  if (module_.code.size() >= Access::kMaxPc) trap("more instructions than the shadow can name");
}

void Machine::add_memory(const void* base, int64_t bytes, int32_t rank) {
  const std::lock_guard lock(mutex_);
  memory_[reinterpret_cast<uint64_t>(base)] = {bytes, rank};
}

void Machine::add_results(const void* base, int64_t bytes, int32_t rank, const int32_t* failed) {
  const std::lock_guard lock(mutex_);
  results_.push_back({reinterpret_cast<uint64_t>(base), bytes, rank, failed});
}

void Machine::set_symmetric(uint8_t* const* bases, int32_t num_pes, int64_t bytes) {
  const std::lock_guard lock(mutex_);
  symmetric_.assign(bases, bases + num_pes);
  symmetric_bytes_ = bytes;
}

void Machine::forget() {
  const std::lock_guard lock(mutex_);
  memory_.clear();
  results_.clear();
  symmetric_.clear();
}

// ---- launches -----------------------------------------------------------------------------------

Grid* Machine::begin(const PtxLaunch& launch) {
  const std::lock_guard lock(mutex_);
  const auto it = module_.index.find(launch.kernel);
  if (it == module_.index.end() || !module_.functions[it->second].is_entry)
    trap(std::string("there is no kernel ") + launch.kernel + " in " + options_.ptx);
  auto grid = std::make_unique<Grid>();
  Grid& g = *grid;
  g.kernel = launch.kernel;
  g.function = &module_.functions[it->second];
  g.blocks_x = launch.blocks;
  g.blocks_y = launch.ranks;
  g.threads = launch.threads;
  g.dynamic_shared = launch.shared_bytes;
  g.first_rank = launch.first_rank;
  g.is_beside = launch.beside != 0;
  g.is_together = launch.together != 0;
  if (g.threads == 0 || g.threads > 1024) trap(g.kernel + ": blocks of 1 to 1024 threads");
  g.params.resize(g.function->entry_bytes + 64);
  for (size_t k = 0; k < g.function->entry_params.size(); ++k) {
    const auto [at, bytes] = g.function->entry_params[k];
    std::memcpy(g.params.data() + at, launch.args[k], bytes);
  }
  const auto of_cluster = static_cast<uint32_t>(g.function->cluster_blocks);
  if (g.blocks_x % of_cluster != 0) trap(g.kernel + ": the grid is no multiple of the clusters");
  for (uint32_t y = 0; y < g.blocks_y; ++y)
    for (uint32_t x = 0; x < g.blocks_x; ++x) {
      auto block = std::make_unique<Block>();
      block->grid = &g;
      block->x = x;
      block->y = y;
      block->rank = g.first_rank + static_cast<int32_t>(y);
      block->device = static_cast<uint32_t>(block->rank);
      block->id = ++num_blocks_;
      if (x % of_cluster == 0) g.clusters.push_back(std::make_unique<Cluster>());
      block->cluster = g.clusters.back().get();
      block->cluster_rank = x % of_cluster;
      block->cluster->blocks.push_back(block.get());
      g.blocks.push_back(std::move(block));
    }
  // At least one block of each rank: ranks wait for each other.
  const uint32_t all = g.blocks_x * g.blocks_y;
  const uint32_t least = std::max(g.blocks_x * (g.blocks_y - 1) + 1, of_cluster);
  if (options_.resident != 0)
    g.resident = static_cast<uint32_t>(options_.resident);
  else
    g.resident = options_.timed() || launch.together != 0 || random(2) == 0
                     ? all
                     : least + random(all - least + 1);
  grids_.push_back(std::move(grid));
  return &g;
}

bool Machine::advance(Grid* grid) {
  const std::lock_guard lock(mutex_);
  for (const auto& g : grids_)
    if (g->admitted < g->blocks.size()) admit(*g);
  if (!grid->done) {
    if (options_.timed())
      slice_in_time();
    else
      slice();
  }
  if (!grid->done) return false;
  report_ = options_.timed() ? report_of(*grid) : "{}";
  const auto it =
      std::find_if(grids_.begin(), grids_.end(), [&](const auto& g) { return g.get() == grid; });
  ended_.push_back(std::move(*it));
  grids_.erase(it);
  if (grids_.empty()) clear();
  return true;
}

// A rank's results have been written and read by what its stream did before: only its own threads
// know of that. A peer that has not seen that the rank has begun races with it.
void Machine::order_behind_stream(Grid& g) {
  for (uint32_t y = 0; y < g.blocks_y; ++y) {
    auto origin = std::make_unique<Warp>();
    origin->block = g.blocks[y * g.blocks_x].get();
    origin->index = static_cast<uint32_t>(warps_.size());
    warps_.push_back(origin.get());
    const Access before(origin->moment(0), static_cast<uint32_t>(g.function->begin), Access::kWeak);
    origin->clock = 2;
    origin->lanes[0].known = KnownPtr::make();
    for (Known::Of& of : origin->lanes[0].known->of) of.add_warp(origin->index, origin->clock);
    if (!options_.timed() && !g.is_beside)
      for (const Results& r : results_) {
        if (r.rank != origin->block->rank) continue;
        shadow_.each(r.base, static_cast<uint64_t>(r.bytes),
                     [&](Shadow::Page& page, uint64_t first, uint64_t end, uint64_t) {
                       for (uint64_t at = first; at < end; ++at) {
                         const Access& wrote = page.write[at];
                         if (!wrote.none() &&
                             (wrote.is_copy() ? copy(wrote.copy()).warp : warps_[wrote.warp()])
                                     ->block->device != origin->block->device)
                           violate("a peer has written to a rank's memory before its kernel began");
                         page.write[at] = before;
                         page.readers[at] = {before};
                       }
                     });
      }
    g.origins.push_back(std::move(origin));
  }
}

bool Machine::has_room(uint32_t device, size_t blocks) {
  return options_.multiprocessors == 0 || busy_[device] + blocks <= options_.multiprocessors;
}

// In the order of the launches, but one that has no room holds up nobody.
void Machine::admit(Grid& g) {
  const auto of_cluster = static_cast<size_t>(g.function->cluster_blocks);
  if (g.admitted == 0 && g.is_together)
    for (uint32_t y = 0; y < g.blocks_y; ++y)
      if (!has_room(g.blocks[y * g.blocks_x]->device, g.blocks_x)) return;
  if (g.origins.empty()) order_behind_stream(g);
  while (g.admitted < g.blocks.size() &&
         g.running + of_cluster <= std::max<size_t>(g.resident, of_cluster) &&
         has_room(g.blocks[g.admitted]->device, of_cluster))
    for (size_t i = 0; i < of_cluster; ++i) admit_block(*g.blocks[g.admitted++]);
}

void Machine::admit_block(Block& block) {
  Grid& g = *block.grid;
  ++g.running;
  ++busy_[block.device];
  block.shared_bytes = module_.dynamic_shared_at() + g.dynamic_shared;
  const size_t bytes = (block.shared_bytes + 2047) / 1024 * 1024;
  block.shared = static_cast<uint8_t*>(std::aligned_alloc(1024, bytes));
  old_shared_.emplace_back(block.shared, &std::free);
  std::memset(block.shared, 0xA5, bytes);
  for (uint32_t i = 0; i * 32 < g.threads; ++i) add_warp(block, i);
}

void Machine::add_warp(Block& block, uint32_t in_block) {
  Grid& g = *block.grid;
  auto warp = std::make_unique<Warp>();
  Warp& w = *warp;
  w.block = &block;
  w.index = static_cast<uint32_t>(warps_.size());
  w.in_block = in_block;
  if (!options_.timed() && (w.index + 1) * 32 > Access::kMaxLanes)
    trap("more lanes in launches that overlap than the shadow can name");
  warps_.push_back(&w);
  const uint32_t lanes = std::min(32u, g.threads - 32 * in_block);
  w.live = lanes == 32 ? ~0u : (1u << lanes) - 1;
  block.live_lanes += lanes;
  Frame* const f = frame(w, 0, *g.function);
  for (uint32_t l = 0; l < 32; ++l) {
    w.pc[l] = static_cast<uint32_t>(g.function->begin);
    w.frame[l] = f;
    w.status[l] = l < lanes ? Status::kRuns : Status::kExited;
    w.lanes[l].known = g.origins[block.y]->lanes[0].known;
  }
  w.now = w.began = now_;
  live_.push_back(&w);
  if (options_.timed()) turns_.push({.at = w.now, .number = w.index, .warp = &w});
  block.warps.push_back(std::move(warp));
}

Frame* Machine::frame(Warp& w, uint32_t depth, const Function& function) {
  if (w.frames.size() <= depth) w.frames.resize(depth + 1);
  for (const auto& f : w.frames[depth])
    if (f->function == &function) return f.get();
  w.frames[depth].push_back(std::make_unique<Frame>(function, options_.timed()));
  return w.frames[depth].back().get();
}

// ---- turns --------------------------------------------------------------------------------------

// Warps take turns of random length at random; between them copies move on and stores arrive.
void Machine::slice() {
  for (int i = 0; i < kTurnsInSlice && !live_.empty(); ++i) {
    const size_t grids = grids_.size();
    Warp& w = *live_[random(static_cast<uint32_t>(live_.size()))];
    if (take_turn(w, 1 + static_cast<int>(random(64))))
      idle_ = 0;
    else if (++idle_ > kStuckTurns && flying_.empty() && underway_.empty())
      stuck("no warp can move");
    if (!flying_.empty() && random(8) == 0) move_one();
    if (!underway_.empty() && random(8) == 0) retire_one();
    if (steps_ - changed_at_ > kStuckSteps) stuck("no memory has changed for a long time");
    for (const auto& g : grids_)
      if (g->done) return;
    if (grids_.size() != grids) return;
  }
}

// The warp whose clock is behind takes one instruction.
void Machine::slice_in_time() {
  for (int i = 0; i < kTurnsInSlice; ++i) {
    for (const auto& g : grids_)
      if (g->done) return;
    if (turns_.empty()) {
      if (events_.empty()) stuck("no warp can move");
      now_ = events_.top().at;
      apply_events();
      continue;
    }
    Warp& w = *turns_.top().warp;
    now_ = turns_.top().at;
    turns_.pop();
    apply_events();
    take_turn(w, 1);
    if (w.live != 0)
      for (int l = 0; l < 32; ++l)
        if ((w.live >> l & 1) != 0 && w.status[l] == Status::kRuns) {
          turns_.push({.at = w.now, .number = w.index, .warp = &w});
          break;
        }
  }
}

bool Machine::take_turn(Warp& w, int budget) {
  const bool moved = run(w, budget);
  if (w.live == 0) end_of_warp(w);
  return moved;
}

void Machine::end_of_warp(Warp& w) {
  std::erase(live_, &w);
  Block& block = *w.block;
  for (const auto& other : block.warps)
    if (other->live != 0) return;
  end_of_block(block);
}

void Machine::end_of_block(Block& block) {
  block.ended = true;
  Grid& g = *block.grid;
  --g.running;
  --busy_[block.device];
  ++g.finished;
  for (const auto& w : block.warps)
    for (const Lane& lane : w->lanes) {
      if (!lane.open.empty())
        violate(g.kernel + ": a thread ended with bulk stores that are not committed");
      for (const auto& group : lane.groups)
        for (const uint64_t id : group)
          if (!copy(id).read || copy(id).read_seen.empty())
            violate(g.kernel + ": a thread ended before its bulk stores had read their source: " +
                    where(copy(id).pc));
    }
  for (Copy* const c : flying_) {
    if (c->is_load() && (c->warp->block == &block || c->to_block == &block))
      violate(g.kernel + ": a block ended with a bulk load under way: " + where(c->pc));
    if (c->form == Copy::kStore && c->warp->block == &block) read_some(*c, true);
  }
  for (const auto& w : block.warps) {
    // The next call's could overtake them.
    if (!w->puts.empty())
      violate(g.kernel + ": a warp ended before its puts and signals had arrived: " +
              where(copy(w->puts.back()).pc));
    w->frames.clear();
  }
  if (g.finished < g.blocks.size()) return admit(g);
  // What a grid stored is there when it has ended.
  for (Copy* const c : std::vector<Copy*>(flying_))
    if (c->warp->block->grid == &g) {
      complete(*c);
      remove_flying(*c);
    }
  for (auto it = underway_.begin(); it != underway_.end();) {
    const Warp& w = *warps_[it->first / 32];
    if (w.block->grid != &g) {
      ++it;
      continue;
    }
    for (const Underway& store : it->second) retire(w, store);
    it = underway_.erase(it);
  }
  check_results(g);
  g.done = true;
}

// What a rank's threads know when they have all ended, its stream's next work may rely on: all that
// peers did to its results.
void Machine::check_results(Grid& g) {
  if (options_.timed() || results_.empty() || g.is_beside) return;
  for (uint32_t y = 0; y < g.blocks_y; ++y) {
    const Block& any = *g.blocks[y * g.blocks_x];
    Known::Of all;
    for (const auto& block : g.blocks) {
      if (block->y != y) continue;
      for (const auto& w : block->warps) {
        all.add_warp(w->index, w->clock + 1);
        std::set<Known*> seen;
        for (const Lane& lane : w->lanes)
          if (lane.known && seen.insert(lane.known.get()).second) all.add(lane.known->of[kGeneric]);
      }
    }
    const auto comes_before = [&](const Access& a, bool wrote) {
      if (!a.is_copy())
        return warps_[a.warp()]->block->device == any.device || all.covers(a.moment());
      const Copy& c = copy(a.copy());
      if (c.warp->block->device == any.device) return true;
      const auto& seen = c.seen(wrote);
      return std::any_of(seen.begin(), seen.end(), [&](const Moment& m) { return all.covers(m); });
    };
    for (const Results& r : results_) {
      if (r.rank != any.rank || (r.failed != nullptr && *r.failed != 0)) continue;
      for (uint64_t base = r.base / Shadow::kPage * Shadow::kPage; base < r.base + r.bytes;
           base += Shadow::kPage) {
        Shadow::Page* const page = shadow_.find(base);
        if (page == nullptr) continue;
        Access last;
        for (uint64_t at = 0; at < Shadow::kPage; ++at) {
          if (base + at < r.base || base + at >= r.base + r.bytes) continue;
          const Access all_of[] = {page->write[at], page->readers[at][0], page->readers[at][1]};
          for (const Access& a : all_of) {
            const bool wrote = &a == all_of;
            if (a.none() || a == last) continue;
            last = a;
            if (!comes_before(a, wrote))
              violate(std::string(wrote ? "a peer's write" : "a peer's read") +
                      " need not come before the end of the rank's kernel: " +
                      where(a.is_copy() ? copy(a.copy()).pc : a.pc()));
          }
        }
      }
    }
  }
}

// Nothing runs: what comes next is behind all that was.
void Machine::clear() {
  shadow_.clear();
  releases_.clear();
  signals_.clear();
  underway_.clear();
  copies_.clear();
  flying_.clear();
  live_.clear();
  warps_.clear();
  ended_.clear();
  old_shared_.clear();
  turns_ = {};
  events_ = {};
  atomic_free_.clear();
  link_free_.clear();
  atomics_.clear();
  calls_.clear();
  now_ = 0;
  // A measurement does not depend on those before it.
  if (options_.timed()) random_.seed(options_.seed);
}

// ---- what a message says ------------------------------------------------------------------------

void Machine::stuck(const char* what) { trap(std::string("stuck: ") + what + "\n" + state()); }

std::string Machine::state() const {
  static const char* const names[] = {"runs",
                                      "has ended",
                                      "waits for its warp",
                                      "waits for its block",
                                      "waits for its cluster",
                                      "waits for bulk stores",
                                      "waits for puts"};
  std::string text;
  for (const Warp* const w : live_) {
    std::map<std::pair<uint32_t, Status>, uint32_t> at;
    for (int l = 0; l < 32; ++l)
      if ((w->live >> l & 1) != 0) at[{w->pc[l], w->status[l]}] |= 1u << l;
    for (const auto& [key, lanes] : at) {
      char line[160];
      std::snprintf(line, sizeof line, "  block (%u, %u) warp %u lanes %08x %s: ", w->block->x,
                    w->block->y, w->in_block, lanes, names[static_cast<int>(key.second)]);
      text += line + where(key.first) + "\n";
    }
  }
  return text;
}

std::string Machine::who(const Warp& w, int lane) const {
  return w.block->grid->kernel + ", block (" + std::to_string(w.block->x) + ", " +
         std::to_string(w.block->y) + "), thread " + std::to_string(w.in_block * 32 + lane);
}

}  // namespace ptx_machine

// ---- the interface ------------------------------------------------------------------------------

extern "C" {

using ptx_machine::Machine;

void* ptx_begin(const PtxLaunch* launch) { return Machine::instance().begin(*launch); }
int32_t ptx_advance(void* grid) {
  return Machine::instance().advance(static_cast<ptx_machine::Grid*>(grid)) ? 1 : 0;
}
void ptx_memory(const void* base, int64_t bytes, int32_t rank) {
  Machine::instance().add_memory(base, bytes, rank);
}
void ptx_results(const void* base, int64_t bytes, int32_t rank, const int32_t* failed) {
  Machine::instance().add_results(base, bytes, rank, failed);
}
void ptx_symmetric(uint8_t* const* bases, int32_t num_pes, int64_t bytes) {
  Machine::instance().set_symmetric(bases, num_pes, bytes);
}
void ptx_forget(void) { Machine::instance().forget(); }
const char* ptx_report(void) { return Machine::instance().report(); }

}  // extern "C"
