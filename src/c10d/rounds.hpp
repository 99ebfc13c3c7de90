// A schedule -> rounds: the order in which chunks travel over a process group.
//
// In a round a rank sends at most one chunk and receives at most one, so that every link carries
// one chunk each way, and no rank is the target of several. Rounds are a pure function of the
// schedule, the same on all ranks.
//
// No deadlock, for any plan and on any backend: a chunk of round t waits, at either end, for that
// rank's chunks of rounds before t alone, and all ranks issue theirs in the order of rounds. So the
// chunks of the first round that has not finished wait for nothing, and finish. That holds if a
// backend runs what a rank issues strictly one after another, too.
#pragma once

#include <algorithm>
#include <cstdint>
#include <vector>

#include "core/schedule/schedule.hpp"

namespace uec::c10d {

// Opens once all the chunks have arrived that what leaves through it is made of.
struct Gate {
  int32_t missing = 0;  // arrivals
  int32_t behind = 0;   // chunks that wait for it
  int32_t opened = -1;  // round of the last arrival
};

// One chunk from one rank to another.
struct Hop {
  int32_t from, to;
  int32_t entry;        // of the schedule
  int32_t replica;      // index among the entry's: whom it is for, or whose gradient it is;
                        // kSum: it is a sum
  int32_t begin, end;   // flag groups
  int32_t progress;     // its middle in its hub's range, of kWhole: experts advance together
  int32_t opens = -1;   // gate at `to`; -1: none
  int32_t behind = -1;  // gate at `from`; -1: none
  int32_t round = -1;
};
inline constexpr int32_t kSum = -1;
inline constexpr int32_t kWhole = 1 << 20;

struct Rounds {
  std::vector<Hop> hops;
  std::vector<Gate> gates;
  int32_t num_rounds = 0;
};

namespace detail {

inline int32_t add_gate(Rounds& rounds, int32_t arrivals, int32_t behind) {
  rounds.gates.push_back({arrivals, behind, -1});
  return static_cast<int32_t>(rounds.gates.size()) - 1;
}

// Calls body(begin, end, progress) for the chunks of a range of flag groups, equal but for
// rounding.
template <class Body>
void cut_range(int32_t begin, int32_t end, int32_t chunk_groups, Body&& body) {
  const int64_t length = end - begin;
  const int64_t count = std::max<int64_t>((length + chunk_groups / 2) / chunk_groups, 1);
  for (int64_t i = 0; i < count && length > 0; ++i)
    body(static_cast<int32_t>(begin + length * i / count),
         static_cast<int32_t>(begin + length * (i + 1) / count),
         static_cast<int32_t>(kWhole * (2 * i + 1) / (2 * count)));
}

}  // namespace detail

// Chunks of a transfer: from the source to each hub, and from the hub to all other replicas.
inline Rounds cut_transfer(const Schedule& s, int32_t chunk_groups) {
  Rounds rounds;
  for (int32_t x = 0; x < s.num_experts; ++x) {
    const int32_t n = s.num_replicas(x), source = s.source[x].rank;
    const int32_t* const rank = s.replica_rank + s.first[x];
    for (int32_t hub = 0; hub <= n; ++hub) {
      const int32_t from = hub == 0 ? source : rank[hub - 1];
      detail::cut_range(
          s.boundaries(x)[hub], s.boundaries(x)[hub + 1], chunk_groups,
          [&](int32_t begin, int32_t end, int32_t progress) {
            const int32_t gate = hub == 0 || n == 1 ? -1 : detail::add_gate(rounds, 1, n - 1);
            if (hub > 0)
              rounds.hops.push_back({source, from, x, hub - 1, begin, end, progress, gate});
            for (int32_t i = 0; i < n; ++i)
              if (i != hub - 1)
                rounds.hops.push_back({from, rank[i], x, i, begin, end, progress, -1, gate});
          });
    }
  }
  return rounds;
}

// Chunks of a reduction: from each replica to the hub that sums it, and from there to the home.
inline Rounds cut_reduction(const Schedule& s, int32_t chunk_groups) {
  Rounds rounds;
  for (int32_t x = 0; x < s.num_experts; ++x) {
    const int32_t n = s.num_replicas(x), home = s.source[x].rank;
    const int32_t* const rank = s.replica_rank + s.first[x];
    for (int32_t hub = 0; hub <= n; ++hub) {
      const int32_t at = hub == 0 ? home : rank[hub - 1];
      detail::cut_range(
          s.boundaries(x)[hub], s.boundaries(x)[hub + 1], chunk_groups,
          [&](int32_t begin, int32_t end, int32_t progress) {
            const int32_t others = hub == 0 ? n : n - 1;
            const int32_t gate = detail::add_gate(rounds, others, hub > 0);
            for (int32_t i = 0; i < n; ++i)
              if (i != hub - 1)
                rounds.hops.push_back({rank[i], at, x, i, begin, end, progress, gate});
            if (hub > 0) rounds.hops.push_back({at, home, x, kSum, begin, end, progress, -1, gate});
          });
    }
  }
  return rounds;
}

// Gives every hop its round. Round by round it matches senders with receivers: first those with
// most left to do, counting what a chunk lets its receiver send on; then as many more as there can
// be, by augmenting paths. That comes within a few percent of the busiest rank's number of chunks.
class Matcher {
 public:
  Matcher(int32_t num_ranks, Rounds& rounds)
      : num_ranks_(num_ranks),
        rounds_(rounds),
        unscheduled_out_(num_ranks),
        unscheduled_in_(num_ranks),
        pairs_of_(num_ranks) {}

  void run() {
    collect();
    size_t left = rounds_.hops.size();
    for (int32_t t = 0; left > 0; ++t) {
      match();
      for (int32_t from = 0; from < num_ranks_; ++from) {
        if (sends_[from] == nullptr) continue;
        take(*sends_[from], t);
        --left;
      }
      rounds_.num_rounds = t + 1;
    }
  }

 private:
  struct Pair {
    int32_t from, to;
    std::vector<int32_t> waiting;        // hops, the preferred first
    size_t next = 0;                     // in `waiting`: of this round
    int64_t max_left = 0, min_left = 0;  // what its ranks have left to do
    const Hop* hop = nullptr;            // waiting[next]
  };

  int32_t gain(const Hop& hop) const { return hop.opens < 0 ? 0 : rounds_.gates[hop.opens].behind; }

  void collect() {
    std::vector<int32_t> index(static_cast<size_t>(num_ranks_) * num_ranks_, -1);
    for (size_t i = 0; i < rounds_.hops.size(); ++i) {
      const Hop& hop = rounds_.hops[i];
      int32_t& at = index[static_cast<size_t>(hop.from) * num_ranks_ + hop.to];
      if (at < 0) {
        at = static_cast<int32_t>(pairs_.size());
        pairs_.push_back({hop.from, hop.to, {}});
        pairs_of_[hop.from].push_back(at);
      }
      pairs_[at].waiting.push_back(static_cast<int32_t>(i));
      ++unscheduled_out_[hop.from];
      ++unscheduled_in_[hop.to];
    }
    for (Pair& pair : pairs_)
      std::stable_sort(pair.waiting.begin(), pair.waiting.end(), [&](int32_t a, int32_t b) {
        const Hop &first = rounds_.hops[a], &second = rounds_.hops[b];
        if (gain(first) != gain(second)) return gain(first) > gain(second);
        return first.progress < second.progress;
      });
    sends_.assign(num_ranks_, nullptr);
    receives_.assign(num_ranks_, nullptr);
    seen_.assign(num_ranks_, -1);
  }

  Hop& hop_at(const Pair& pair, size_t i) { return rounds_.hops[pair.waiting[i]]; }

  // Whether what it is made of has arrived, in rounds before the one that is being matched.
  bool can_start(const Hop& hop) const {
    return hop.behind < 0 || rounds_.gates[hop.behind].missing == 0;
  }

  void match() {
    std::fill(sends_.begin(), sends_.end(), nullptr);
    std::fill(receives_.begin(), receives_.end(), nullptr);
    ready_.clear();
    for (Pair& pair : pairs_) {
      pair.next = 0;
      while (pair.next < pair.waiting.size() && !can_start(hop_at(pair, pair.next))) ++pair.next;
      pair.hop = pair.next < pair.waiting.size() ? &hop_at(pair, pair.next) : nullptr;
      if (pair.hop == nullptr) continue;
      const int64_t out = unscheduled_out_[pair.from] + gain(*pair.hop);
      const int64_t in = unscheduled_in_[pair.to];
      pair.max_left = std::max(out, in);
      pair.min_left = std::min<int64_t>(unscheduled_out_[pair.from], in);
      ready_.push_back(&pair);
    }
    std::sort(ready_.begin(), ready_.end(), [&](const Pair* a, const Pair* b) {
      if (a->max_left != b->max_left) return a->max_left > b->max_left;
      if (a->min_left != b->min_left) return a->min_left > b->min_left;
      if (a->hop->progress != b->hop->progress) return a->hop->progress < b->hop->progress;
      return a->from != b->from ? a->from < b->from : a->to < b->to;
    });
    for (Pair* pair : ready_) {
      if (sends_[pair->from] != nullptr || receives_[pair->to] != nullptr) continue;
      sends_[pair->from] = receives_[pair->to] = pair;
    }
    // Receivers of a search in vain have none to give up, whichever others find one after that.
    ++search_;
    for (Pair* pair : ready_)
      if (sends_[pair->from] == nullptr && augment(pair->from)) ++search_;
  }

  // Finds a receiver for a rank that has none, by giving others another one.
  bool augment(int32_t from) {
    for (const int32_t at : pairs_of_[from]) {
      Pair& pair = pairs_[at];
      if (pair.hop == nullptr || seen_[pair.to] == search_) continue;
      seen_[pair.to] = search_;
      if (receives_[pair.to] != nullptr && !augment(receives_[pair.to]->from)) continue;
      sends_[from] = receives_[pair.to] = &pair;
      return true;
    }
    return false;
  }

  void take(Pair& pair, int32_t t) {
    Hop& hop = hop_at(pair, pair.next);
    hop.round = t;
    --unscheduled_out_[hop.from];
    --unscheduled_in_[hop.to];
    if (hop.opens >= 0 && --rounds_.gates[hop.opens].missing == 0)
      rounds_.gates[hop.opens].opened = t;
    pair.waiting.erase(pair.waiting.begin() + static_cast<std::ptrdiff_t>(pair.next));
  }

  int32_t num_ranks_;
  Rounds& rounds_;
  std::vector<int32_t> unscheduled_out_, unscheduled_in_;  // [G] hops without a round
  std::vector<std::vector<int32_t>> pairs_of_;             // [G] of each sender
  std::vector<Pair> pairs_;
  std::vector<Pair*> ready_, sends_, receives_;
  std::vector<int32_t> seen_;  // [G] the last search that came to a receiver
  int32_t search_ = -1;
};

}  // namespace uec::c10d
