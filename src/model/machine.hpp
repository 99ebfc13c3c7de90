// A described machine: what a modelled transfer takes its times from. Times in picoseconds.
#pragma once

#include <cmath>
#include <cstdint>

namespace uec::model {

// One kind of copy: how long a byte occupies the sender's link and the receiver's link.
struct Rate {
  double egress = 0, ingress = 0;  // picoseconds a byte

  static int64_t time(double per_byte, int64_t bytes) {
    return static_cast<int64_t>(std::ceil(per_byte * static_cast<double>(bytes)));
  }
};

struct Machine {
  Rate store, load;          // inside a domain
  Rate far_store, far_load;  // between domains, over links of their own
  int64_t store_ps = 0;     // from the last byte taken to the sender's knowing that it is delivered
  int64_t flag_ps = 0;      // from a publish to its being observed
  int64_t load_ps = 0;      // from a remote load's issue to its first byte
  int64_t far_ps = 0;       // what each of these takes more between domains
  int32_t domain_size = 0;  // ranks of a domain; 0: there is one domain
  double unloaded = 1;      // of the time that a byte takes, what is left while one link is busy
  int32_t workers = 1;      // of a rank
  int32_t stages = 1;       // of a worker: its tiles in flight
  bool fair = true;         // a home serves the ranks that load from it in turns, else in the order
                            // in which they asked
  int64_t call_ps = 0;      // what a call takes before anything else
  int64_t finish_ps = 0;    // and behind everything

  // What a worker spends, on its fetch side or its store side. While it does, that side does
  // nothing else.
  int64_t poll_ps = 0;           // of a look at the flags that it waits for
  int64_t fetch_ps = 0;          // of a tile
  int64_t store_ps_of_tile = 0;  // likewise
  int64_t publish_ps = 0;        // of a flag
  int64_t gather_ps = 0;         // of handing an addition to who adds
  int64_t add_ps = 0;            // of adding a tile of a replica's gradients, behind its load
  int64_t clear_ps = 0;          // of clearing one

  // Ranks whose own cores make their copies, in a memory that all share: a tile's first store also
  // reads it, wherever it lies, and a rank's own slot takes a copy like any other.
  double shared = 0;     // the part of a copy's time that it keeps the memory; 0: these are links
  double read = 0;       // picoseconds a byte, of what a tile's first store reads
  int64_t group_ps = 0;  // what handing on a flag group takes of a hub's core

  bool cores() const { return shared > 0; }
  bool far(int32_t a, int32_t b) const {
    return domain_size > 0 && a / domain_size != b / domain_size;
  }
  const Rate& rate(bool is_load, bool is_far) const {
    return is_load ? (is_far ? far_load : load) : (is_far ? far_store : store);
  }
};

}  // namespace uec::model
