/* The flag protocol of replicate_experts() at the granularity of flags, for spin to search in full.
 *
 * RANKS ranks make two calls on one group, each under a plan of its own, and nothing but flags
 * holds them together: a rank may be a call ahead of another. tests/model/test_protocol_model.py runs
 * every configuration and every mutant; docs/developing.md shows how to run one by hand.
 *
 *   -DMODE=PUSH | PULL | DIRECT
 *   -DRANKS=3 | 4
 *   -DPLANS=CYCLE | SPLIT | WIDE     the two plans, see MakePlans
 *   -DTROUBLE=NOTHING | CRASH | EXPIRY | MISMATCH
 *       CRASH: one rank, any, stops for good at any point, or none does
 *       EXPIRY: one wait, any, expires although its partner is only late: a live rank fails
 *       MISMATCH: one rank, any, makes its first call under the plan of the second
 *   -DMUTANT=...                     one rule broken, see below; the search must find an error
 *   -DPROBE=expression               the search must find a state where it holds
 *
 * What stands for what:
 *   Rank                  Engine::run_next, execute, drive: a rank with one worker
 *     announce            announce_call(), announce_open() in announce.hpp
 *     work, MOVABLE       WorkQueue::take, check_open, TransferPieces::ready; any movable item, in any
 *                         order
 *     publish             Storer::publish, finish_task
 *     finish              Finish::step
 *     returned            the caller has its slots, and changes its main weights
 *     fail                Engine::report_fault, announce_abort, publish_failure
 *   Mover                 a Mover's stores under way: load, then delivery to one rank at a time
 *   STUCK_..., BEYOND     check_call and check_flag; a flag is read again before its writer is
 *                         blamed, and as no flag follows a record that is ahead, one look at both
 *                         shows what the second look would
 *   ABORTED               find_abort
 *   stopped == p          a peer that is gone, or whose flag has not come within the time limit:
 *                         only who waits for the stopped rank itself is freed by that, so that all
 *                         others have to be freed by abort words
 *   item                  a piece (worklist.hpp) of one flag group: expert x's range of hub v is
 *                         item x * RANKS + v of each rank that moves it
 *   call open ready done pulled abort, epoch     as in protocol.hpp, with == between epochs
 *
 * Left out: memory ordering of publish and observe (the simulated memory with vector clocks and
 * ThreadSanitizer have that), so a flag is seen as soon as it is stored; tiles, bytes and the
 * ring's size: all movable items may be under way; several workers; the culprit in an abort word,
 * which only serves the report; rejected and closed records.
 *
 * What a mutant removes:
 *   PUBLISH_REUSABLE  delivery before a publish: it is enough that the source may be reused
 *   DONE_EARLY        the wait for all of a task's groups: each of them publishes `done`
 *   NO_OPEN           the wait for `open`
 *   NO_CALL           the look at the record before a store or a remote load
 *   NO_HOME_OPEN      a pull hub's wait for the home
 *   NO_READY          a push hub's wait for `ready`
 *   STALE_FLAG        the comparison of epochs: any flag ever set will do
 *   BLOCKING_HUB      skipping: hub items come first, and home items wait behind them
 *   WITHHELD          the publish before an empty ring: only a later item pushes a group out
 *   DONE_ASTRAY       the right receiver of `done`: it goes to the rank after it
 *   DONE_NOT_TO_HUB   `done` from the home to a hub
 *   NEXT_EARLY        the end of own reads before call and open of the next epoch
 *   PULLED_IGNORED    the home's wait for `pulled`
 *   PULLED_EARLY      the end of the load before `pulled`
 *   DIGEST_IGNORED    the digest in a record
 *   ABORT_UNREAD      a pull hub's look at its abort flags before it publishes
 *   ABORT_LATE        the abort before the failing call returns
 *   NO_ABORT          the abort
 *   LATER_ABORT       the epoch in an abort word: a rank obeys one of a later call
 *   NO_TIMEOUT        the bound of a wait
 *   NO_REREAD         the second look at a flag before a peer that is beyond is blamed
 */
#define PUSH 0
#define PULL 1
#define DIRECT 2
#define CYCLE 0
#define SPLIT 1
#define WIDE 2
#define NOTHING 0
#define CRASH 1
#define EXPIRY 2
#define MISMATCH 3
#ifndef MODE
#define MODE PUSH
#endif
#ifndef RANKS
#define RANKS 3
#endif
#ifndef PLANS
#define PLANS CYCLE
#endif
#ifndef TROUBLE
#define TROUBLE NOTHING
#endif
#ifndef MUTANT
#define MUTANT NONE
#endif
mtype = { NONE, PUBLISH_REUSABLE, DONE_EARLY, NO_OPEN, NO_CALL, NO_HOME_OPEN, NO_READY, STALE_FLAG,
          BLOCKING_HUB, WITHHELD, DONE_ASTRAY, DONE_NOT_TO_HUB, NEXT_EARLY, PULLED_IGNORED,
          PULLED_EARLY, DIGEST_IGNORED, ABORT_UNREAD, ABORT_LATE, NO_ABORT, LATER_ABORT, NO_TIMEOUT,
          NO_REREAD };

#define EXPERTS 2               /* replicated experts in a plan, at most; one home each */
#define SLOTS 2                 /* per rank */
#define ITEMS (EXPERTS * RANKS) /* expert x's range of hub v is item x * RANKS + v */
#define NOBODY RANKS
#define LOAD 128                /* in flight[]: the source has yet to be read */

#define WHEN(condition, statement) if :: condition -> statement :: else fi
#define BIT(p) (1 << (p))
#define IN(mask, p) ((mask) >> (p) & 1)
#if RANKS == 3
#define FOUR(text)
#else
#define FOUR(text) text
#endif
#define EACH_RANK(f) f(0) f(1) f(2) FOUR(f(3))
#define EACH_ITEM(f) f(0) f(1) f(2) f(3) f(4) f(5) FOUR(f(6) f(7))
#define SOME_RANK(f, r) (f(r, 0) || f(r, 1) || f(r, 2) FOUR(|| f(r, 3)))
#define SOME_ITEM(f, r, p) \
  (f(r, p, 0) || f(r, p, 1) || f(r, p, 2) || f(r, p, 3) || f(r, p, 4) || f(r, p, 5) \
   FOUR(|| f(r, p, 6) || f(r, p, 7)))

/* ---- properties: a violated one is named in pan's message; that all end is pan's own ----------
 * `hidden`: no part of a state. */
hidden byte slot_is_open;     /* a store finds its slot open for this call, under one digest */
hidden byte slot_is_ready;    /* a push hub reads this call's data in its slot */
hidden byte main_is_final;    /* main weights are this call's while a rank reads them */
hidden byte slots_are_filled; /* after success each filled slot holds this call's data */
hidden byte fault_has_cause;  /* no rank fails in a call before a fault occurred */
#define HOLDS(property, condition) property = (condition); assert(property)

/* ---- plans and work lists: constant, so hidden ----------------------------------------------- */
hidden byte home_of[2 * EXPERTS], replicas_of[2 * EXPERTS], hubs_of[2 * EXPERTS];
hidden byte slot_of[2 * EXPERTS];
hidden byte items_of[2 * RANKS];             /* by plan and rank: what this rank moves */
hidden byte destinations[2 * RANKS * ITEMS]; /* and to which ranks */
hidden byte gates[2 * RANKS * ITEMS];        /* ranks that have to be open first */
hidden byte senders[2 * RANKS * EXPERTS];    /* whose `done` this rank expects for its slot */
hidden byte receivers[2 * RANKS * EXPERTS];  /* to whom it sends `done` */
hidden byte readers[2 * RANKS];              /* whose `pulled` it expects */
hidden byte writers[2 * RANKS];              /* for whom it opens */

/* ---- symmetric memory: flags live at the waiter, data in the slots --------------------------- */
#define AT(rank, from) ((rank) * RANKS + (from))
byte call[RANKS * RANKS], open[RANKS * RANKS], abort[RANKS * RANKS], pulled[RANKS * RANKS];
byte ready[RANKS * SLOTS], done[RANKS * SLOTS * RANKS];
byte slot[RANKS * SLOTS * RANKS]; /* by the hub whose range it is */
byte main[RANKS];                 /* the epoch for which the weights are made; 0: changed, failed */
#define PAYLOAD(number, home) ((number) << 2 | (home))

/* ---- private to a rank, or only here to check with ------------------------------------------- */
byte epoch[RANKS];  /* the call it is in, or next */
byte inside[RANKS]; /* the same from begin to return, else 0 */
byte taken[RANKS], sent[RANKS];                 /* items */
byte flight[RANKS * ITEMS], value[RANKS * ITEMS]; /* undelivered destinations; what was loaded */
bool failed[RANKS];
byte stopped = NOBODY, deviant = NOBODY;
#if TROUBLE == CRASH
byte victim; /* who may stop */
chan stop[RANKS] = [0] of { bit }; /* a meeting: Crash and the victim act in one step */
#endif
byte trouble; /* the epoch in which something went wrong */

#if TROUBLE == MISMATCH
#define DIGEST(r) (deviant == (r))
#define PLAN(r) (deviant == (r) -> 2 - epoch[r] : epoch[r] - 1)
#else
#define DIGEST(r) 0
#define PLAN(r) (epoch[r] - 1)
#endif
#define RECORD(r) (epoch[r] << 1 | DIGEST(r)) /* chained: a digest that differs once stays so */
#define BY_RANK(r) (PLAN(r) * RANKS + (r))
#define BY_ITEM(r, n) (BY_RANK(r) * ITEMS + (n))
#define BY_EXPERT(r, x) (BY_RANK(r) * EXPERTS + (x))
#define EXPERT(r, n) (PLAN(r) * EXPERTS + (n) / RANKS)
#define HOME(r, n) home_of[EXPERT(r, n)]
#define SLOT(r, n) slot_of[EXPERT(r, n)]
#define HUB(n) ((n) % RANKS)
#define FLIGHT(r, n) flight[(r) * ITEMS + (n)]
#define VALUE(r, n) value[(r) * ITEMS + (n)]
#define PULLS(r, n) (MODE == PULL && HOME(r, n) != (r))
#define FORWARDS(r, n) (MODE == PUSH && HOME(r, n) != (r))
#define FEEDS(r, n) (HOME(r, n) == (r) && HUB(n) != (r))
/* The memory of a rank that has ended early is not observed: stores to it are dropped, so that
 * states that differ only there are one. */
#define ALIVE(p) (!failed[p] && stopped != (p))

/* ---- observing ------------------------------------------------------------------------------- */
#define IS_NOW(r, flag) ((flag) == epoch[r] || (MUTANT == STALE_FLAG && (flag) != 0))
#define CALLED(r, p) \
  (call[AT(r, p)] == RECORD(r) || MUTANT == NO_CALL || \
   (MUTANT == DIGEST_IGNORED && call[AT(r, p)] >> 1 == epoch[r]))
#define IS_OPEN(r, p) (CALLED(r, p) && (IS_NOW(r, open[AT(r, p)]) || MUTANT == NO_OPEN))
#define IS_READY(r, n) (IS_NOW(r, ready[(r) * SLOTS + SLOT(r, n)]) || MUTANT == NO_READY)
#define IS_DONE(r, p, x) IS_NOW(r, done[AT((r) * SLOTS + slot_of[PLAN(r) * EXPERTS + (x)], p)])
#define BEYOND(r, p) \
  (call[AT(r, p)] >> 1 >= epoch[r] && call[AT(r, p)] != RECORD(r) && \
   !(MUTANT == DIGEST_IGNORED && call[AT(r, p)] >> 1 == epoch[r]))
#define LOST(r, p) (BEYOND(r, p) || (stopped == (p) && MUTANT != NO_TIMEOUT))
#define ABORTED_BY(r, p) \
  (abort[AT(r, p)] != 0 && (abort[AT(r, p)] <= epoch[r] || MUTANT == LATER_ABORT))
#define ABORTED(r) SOME_RANK(ABORTED_BY, r)
/* disagreeing_peer(): its record for our last call differs from ours. */
#define DISAGREED_WITH(r, p) \
  (epoch[r] > 1 && call[AT(r, p)] >> 1 == epoch[r] - 1 && (call[AT(r, p)] & 1) != DIGEST(r))

/* ---- what may be taken, published, waited for ------------------------------------------------ */
#define LEFT(r, n) IN(items_of[BY_RANK(r)] & ~taken[r], n)
#define SHUT(r, p, n) (IN(gates[BY_ITEM(r, n)], p) && !IS_OPEN(r, p))
#define GATE_OPEN(r, n) !(SHUT(r, 0, n) || SHUT(r, 1, n) || SHUT(r, 2, n) FOUR(|| SHUT(r, 3, n)))
#define HUB_LEFT(r, p, n) (LEFT(r, n) && HOME(r, n) != (r))
#define BEHIND_HUB(r, n) (HOME(r, n) == (r) && SOME_ITEM(HUB_LEFT, r, 0))
#define MOVABLE(r, n) \
  (LEFT(r, n) && GATE_OPEN(r, n) && (!FORWARDS(r, n) || IS_READY(r, n)) && \
   !(MUTANT == BLOCKING_HUB && BEHIND_HUB(r, n)))
#define STUCK_ITEM(r, p, n) \
  (LEFT(r, n) && \
   (SHUT(r, p, n) || (FORWARDS(r, n) && HOME(r, n) == (p) && !IS_READY(r, n))))
#define STUCK_WORK(r, p) (LOST(r, p) && SOME_ITEM(STUCK_ITEM, r, p))

#define DELIVERED(r, n) \
  (FLIGHT(r, n) == 0 || (MUTANT == PUBLISH_REUSABLE && !(FLIGHT(r, n) & LOAD)))
#define HELD_BACK(r, n) ((taken[r] & ~sent[r]) == BIT(n) && taken[r] != items_of[BY_RANK(r)])
#define PUBLISHABLE(r, n) \
  (IN(taken[r] & ~sent[r], n) && DELIVERED(r, n) && !(MUTANT == WITHHELD && HELD_BACK(r, n)))
#define TASK_COMPLETE(r, n) \
  (((items_of[BY_RANK(r)] & ~sent[r]) >> ((n) / RANKS * RANKS) & (BIT(RANKS) - 1)) == 0 || \
   MUTANT == DONE_EARLY)
#define DONE_TO(r, n) \
  (receivers[BY_EXPERT(r, (n) / RANKS)] & \
   ~(MUTANT == DONE_NOT_TO_HUB && HOME(r, n) == (r) -> hubs_of[EXPERT(r, n)] : 0))
#define DONE_AT(p) (MUTANT == DONE_ASTRAY -> ((p) + 1) % RANKS : (p))
#define UNDELIVERED(r, p, n) (FLIGHT(r, n) != 0)

#define OWES_DONE(r, p, x) (IN(senders[BY_EXPERT(r, x)], p) && !IS_DONE(r, p, x))
#define OWES_PULLED(r, p) \
  (IN(readers[BY_RANK(r)], p) && !IS_NOW(r, pulled[AT(r, p)]) && MUTANT != PULLED_IGNORED)
#define OWES(r, p) (OWES_DONE(r, p, 0) || OWES_DONE(r, p, 1) || OWES_PULLED(r, p))
#define STUCK_FINISH(r, p) \
  (LOST(r, p) && (OWES(r, p) || (MUTANT == NO_REREAD && IN(writers[BY_RANK(r)], p))))

/* ---- moving ---------------------------------------------------------------------------------- */
inline Load(r, n) {
  if
  :: FORWARDS(r, n) ->
     VALUE(r, n) = slot[AT(r * SLOTS + SLOT(r, n), HUB(n))];
     HOLDS(slot_is_ready, VALUE(r, n) == PAYLOAD(epoch[r], HOME(r, n)))
  :: else ->
     VALUE(r, n) = PAYLOAD(main[HOME(r, n)], HOME(r, n));
     /* A hub may load what a failed home has changed, if it then reads the abort. */
     HOLDS(main_is_final, (VALUE(r, n) == PAYLOAD(epoch[r], HOME(r, n)) &&
                           DIGEST(HOME(r, n)) == DIGEST(r)) || failed[HOME(r, n)])
  fi;
  FLIGHT(r, n) = FLIGHT(r, n) & ~LOAD
}

inline Deliver(r, n, to) {
  HOLDS(slot_is_open, inside[to] == epoch[r] && DIGEST(to) == DIGEST(r) &&
                      (to == r || open[AT(r, to)] == epoch[r] || stopped == r));
  WHEN(ALIVE(to), slot[AT(to * SLOTS + SLOT(r, n), HUB(n))] = VALUE(r, n));
  FLIGHT(r, n) = FLIGHT(r, n) & ~BIT(to);
  WHEN(FLIGHT(r, n) == 0, VALUE(r, n) = 0)
}

#define PICK_ITEM(i) :: FLIGHT(r, i) != 0 -> n = i
#define PICK_RANK(p) :: IN(FLIGHT(r, n), p) -> to = p

/* Each load and each delivery is one step, between any two steps of anybody else. */
proctype Mover(byte r) {
  byte n, to;
end:
  do
  :: atomic {
       if EACH_ITEM(PICK_ITEM) fi;
       if
       :: FLIGHT(r, n) & LOAD -> d_step { Load(r, n); n = 0 }
       :: else ->
          if EACH_RANK(PICK_RANK) fi;
          d_step { Deliver(r, n, to); n = 0; to = 0 }
       fi
     }
  od
}

/* ---- a rank ---------------------------------------------------------------------------------- */
#define PICK_WORK(i) :: MOVABLE(r, i) || PUBLISHABLE(r, i) -> n = i

/* A publish to each rank of a mask. Where this rank may stop between two they are separate steps;
 * else one, since a flag that is there early is no different from one that is looked at late. */
#define PUBLISH(mask, flag, number) WHEN(IN(mask, p) && ALIVE(p), flag = number); p++
#if TROUBLE == CRASH
#define PUBLISH_TO(mask, flag, number) \
  do \
  :: atomic { \
       do \
       :: p < RANKS -> PUBLISH(mask, flag, number); WHEN(victim == r, break) \
       :: else -> break \
       od; \
       WHEN(p == RANKS, p = 0; break) \
     } \
  od
#else
#define PUBLISH_TO(mask, flag, number) \
  atomic { \
    do \
    :: p < RANKS -> PUBLISH(mask, flag, number) \
    :: else -> p = 0; break \
    od \
  }
#endif

#if TROUBLE == EXPIRY
#define EXPIRES :: atomic { trouble == 0 -> trouble = epoch[r]; goto fail }
#else
#define EXPIRES
#endif

inline Forget(r) {
  taken[r] = 0; sent[r] = 0;
  for (n : r * RANKS .. (r + 1) * RANKS - 1) {
    call[n] = 0; open[n] = 0; abort[n] = 0; pulled[n] = 0
  }
  for (n : r * SLOTS .. (r + 1) * SLOTS - 1) { ready[n] = 0 }
  for (n : r * SLOTS * RANKS .. (r + 1) * SLOTS * RANKS - 1) { done[n] = 0; slot[n] = 0 }
  n = 0; p = 0
}

inline Settle(r) { /* from here on the caller may change its main weights */
  atomic {
    !SOME_ITEM(UNDELIVERED, r, 0);
    d_step { failed[r] = true; main[r] = 0; Forget(r) }
  }
}

inline CheckSlots(r) {
  for (n : 0 .. ITEMS - 1) {
    WHEN(IN(replicas_of[EXPERT(r, n)], r) && IN(hubs_of[EXPERT(r, n)], HUB(n)),
         HOLDS(slots_are_filled, slot[AT(r * SLOTS + SLOT(r, n), HUB(n))] ==
                                 PAYLOAD(epoch[r], HOME(r, n))))
  }
}

proctype Rank(byte r) {
  byte n, p;
  {
    skip;
begin:
    WHEN(ABORTED(r) || SOME_RANK(DISAGREED_WITH, r), goto fail);
    inside[r] = epoch[r];
    PUBLISH_TO(~BIT(r), call[AT(p, r)], RECORD(r));
    PUBLISH_TO(writers[BY_RANK(r)], open[AT(p, r)], epoch[r]);

work:
    /* Flags that let a rank go on stay as they are until it has gone on: looking and taking are
     * one step. */
    atomic {
      if
      EACH_ITEM(PICK_WORK)
      :: sent[r] == items_of[BY_RANK(r)] -> goto finish
      :: SOME_RANK(STUCK_WORK, r) || ABORTED(r) -> goto fail
      EXPIRES
      :: MUTANT == NEXT_EARLY && epoch[r] == 1 && !SOME_RANK(OWES, r) &&
         call[AT((r + 1) % RANKS, r)] == RECORD(r) ->
         for (p : 0 .. RANKS - 1) {
           call[AT(p, r)] = RECORD(r) + 2; open[AT(p, r)] = epoch[r] + 1
         };
         p = 0; goto work
      fi;
      if
      :: !IN(taken[r], n) ->
         d_step {
           WHEN(MUTANT == PULLED_EARLY && PULLS(r, n), pulled[AT(HOME(r, n), r)] = epoch[r]);
           taken[r] = taken[r] | BIT(n);
           FLIGHT(r, n) = LOAD | destinations[BY_ITEM(r, n)];
           n = 0
         };
         goto work
      :: else
      fi
    };

    /* publish */
    d_step {
      WHEN(FEEDS(r, n) && ALIVE(HUB(n)), ready[HUB(n) * SLOTS + SLOT(r, n)] = epoch[r]);
      sent[r] = sent[r] | BIT(n)
    };
    if
    :: TASK_COMPLETE(r, n) ->
       WHEN(PULLS(r, n) && ABORTED(r) && MUTANT != ABORT_UNREAD, goto fail);
       PUBLISH_TO(DONE_TO(r, n), done[AT(DONE_AT(p) * SLOTS + SLOT(r, n), r)], epoch[r]);
       WHEN(PULLS(r, n) && ALIVE(HOME(r, n)), pulled[AT(HOME(r, n), r)] = epoch[r])
    :: else
    fi;
    n = 0;
    goto work;

finish:
    if
    :: !SOME_RANK(OWES, r)
    :: SOME_RANK(STUCK_FINISH, r) || ABORTED(r) -> goto fail
    EXPIRES
    fi;

    /* returned */
    d_step {
      CheckSlots(r);
      n = 0; inside[r] = 0; taken[r] = 0; sent[r] = 0;
      main[r] = main[r] + 1;
      epoch[r]++
    };
    if :: epoch[r] <= 2 -> goto begin :: else -> goto ended fi;

fail:
    atomic { HOLDS(fault_has_cause, trouble != 0 && trouble <= epoch[r]); n = 0; p = 0 };
    WHEN(MUTANT == ABORT_LATE, Settle(r));
    PUBLISH_TO((MUTANT == NO_ABORT -> 0 : ~BIT(r)), abort[AT(p, r)], epoch[r]);
    Settle(r)
  }
#if TROUBLE == CRASH
  unless {
    atomic { /* what it had stored may still arrive; it loads no more */
      stop[r] ? 0;
      d_step {
        stopped = r; trouble = epoch[r];
        for (n : r * ITEMS .. (r + 1) * ITEMS - 1) { WHEN(flight[n] & LOAD, flight[n] = 0) }
        Forget(r)
      }
    }
  };
#endif
ended:
  skip
}

#if TROUBLE == CRASH
#define CHOOSE_VICTIM(p) :: victim = p
proctype Crash() { if :: stop[victim] ! 0 :: true fi }
#endif

#ifdef PROBE
proctype Probe() {
end:
  atomic { PROBE -> assert(false) }
}
#endif

/* ---- schedules and work lists ---------------------------------------------------------------- */
inline Send(a_plan, expert, from, range, to, first) { /* `first`: ranks to be open besides */
  items_of[a_plan * RANKS + from] = items_of[a_plan * RANKS + from] | BIT(expert * RANKS + range);
  i = (a_plan * RANKS + from) * ITEMS + expert * RANKS + range;
  destinations[i] = to;
  gates[i] = (to | first) & ~BIT(from);
  i = (a_plan * RANKS + from) * EXPERTS + expert;
  receivers[i] = receivers[i] | (to & ~BIT(from));
  for (d : 0 .. RANKS - 1) {
    i = (a_plan * RANKS + d) * EXPERTS + expert;
    if
    :: IN(to, d) && d != from ->
       senders[i] = senders[i] | BIT(from);
       writers[a_plan * RANKS + d] = writers[a_plan * RANKS + d] | BIT(from)
    :: else
    fi
  }
}

inline Replicate(plan, x, h, replicas, hubs, s) {
  i = plan * EXPERTS + x;
  home_of[i] = h;
  replicas_of[i] = replicas;
  hubs_of[i] = (MODE == DIRECT -> BIT(h) : hubs);
  slot_of[i] = s;
  for (v : 0 .. RANKS - 1) {
    if
    :: !IN(hubs_of[plan * EXPERTS + x], v)
    :: else ->
       if
       :: v == h -> Send(plan, x, v, v, (replicas), 0)
       :: v != h && MODE == PUSH ->
          Send(plan, x, h, v, BIT(v), 0);
          Send(plan, x, v, v, ((replicas) & ~BIT(v)), 0)
       :: else ->
          Send(plan, x, v, v, (replicas), (MUTANT == NO_HOME_OPEN -> 0 : BIT(h)));
          readers[plan * RANKS + h] = readers[plan * RANKS + h] | BIT(v);
          writers[plan * RANKS + h] = writers[plan * RANKS + h] | BIT(v)
       fi
    fi
  }
}

/* plan, expert, home, replicas, hubs with a range, slot */
inline MakePlans() {
#if PLANS == CYCLE /* each home is the other's hub: either could hold the other's input */
  Replicate(0, 0, 0, BIT(1) | BIT(2), BIT(1), 0);
  Replicate(0, 1, 1, BIT(0) | BIT(2), BIT(0), 1);
  Replicate(1, 0, 0, BIT(1) | BIT(2), BIT(1) | BIT(2), 0)
#elif PLANS == SPLIT /* home and replicas are hubs; slots change hands; a chain */
  Replicate(0, 0, 0, BIT(1) | BIT(2), BIT(0) | BIT(1) | BIT(2), 0);
  Replicate(1, 0, 2, BIT(0) | BIT(1), BIT(0) | BIT(2), 0);
  Replicate(1, 1, 1, BIT(0), BIT(1), 1)
#else /* four ranks */
  Replicate(0, 0, 0, BIT(1) | BIT(2) | BIT(3), BIT(0) | BIT(1), 0);
  Replicate(1, 0, 1, BIT(2) | BIT(3), BIT(2), 0);
  Replicate(1, 1, 2, BIT(0) | BIT(1), BIT(1), 1)
#endif
}

#define DEVIATE(p) :: deviant = p
init {
  byte i, v, d;
  atomic {
    d_step {
      MakePlans();
      for (i : 0 .. RANKS - 1) { epoch[i] = 1; main[i] = 1 }
      i = 0; v = 0; d = 0
    };
#if TROUBLE == MISMATCH
    trouble = 1;
    if EACH_RANK(DEVIATE) fi;
#endif
#if TROUBLE == CRASH
    if EACH_RANK(CHOOSE_VICTIM) fi;
    run Crash();
#endif
    do
    :: i < RANKS -> run Mover(i); run Rank(i); i++
    :: else -> break
    od;
#ifdef PROBE
    run Probe();
#endif
    i = 0
  }
}
