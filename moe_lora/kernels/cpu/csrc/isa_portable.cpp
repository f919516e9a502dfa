// SPDX-License-Identifier: Apache-2.0
// Any processor.
#include "tiles.h"

namespace {
#include "tiles.inl"
#include "vec_portable.h"
}  // namespace

const IsaTable* portable_table() {
    static const IsaTable table = make_table<Portable>("portable");
    return &table;
}
