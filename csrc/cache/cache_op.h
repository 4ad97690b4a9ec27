// What the ops that write and read tokens of a cache share: checks of their slots.
#pragma once

#include "door.h"

namespace pagedattn {

inline Indices check_slots(const Door& door, const Tensor& slot_mapping) {
  door.present("slot_mapping", slot_mapping);
  const Indices result = door.indices("slot_mapping", slot_mapping);
  door.rank("slot_mapping", slot_mapping, 1);
  door.contiguous("slot_mapping", slot_mapping);
  return result;
}

// Slots within the cache. Negative slots are skipped.
struct SlotCheck {
  Door door;
  HostValues values;  // of slot_mapping
  bool are_int64;
  int64_t num_tokens;
  int64_t num_slots;  // of the cache

  void operator()() const {
    const Indices slots{values.data, are_int64};
    for (int64_t token = 0; token < num_tokens; ++token) {
      door.check(slots[token] < num_slots, "slot_mapping", "expected slots below ", num_slots, ", got ", slots[token],
                 " at token ", token);
    }
  }
};

}  // namespace pagedattn
