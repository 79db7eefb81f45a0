"""The user's state as the bytes of one portable file.

    collect ─► tree ─► survey: tensors, their storages ─► skeleton: the file of `torch.save`, with holes for tensors
                                                           └─► each later save: recall ─► capture

tree, survey                     the state as a tree, and who may change which tensor; the tensors and their storages
skeleton, sparse_file            the layout of the file; the file as literals and holes
recall                           makes later captures cheap if only values have changed
pickling, pickle_bounds          `torch.save` without tensor bytes; refuses pickles that cost too much to load
tensor_table                     the table of tensors that all ranks compare, with a checksum of each

per_rank, per_rank_blob          `PerRank`: a value that differs between ranks; its bytes in the file
rng                              `RngState`: all random number generators
optimizer_places                 the optimizers of a state, and where their dictionaries lie in its tree
position_names                   names of parameters that a file only numbers

split_tensor, split_kinds        this rank's part of a tensor; refuses objects that are split in unsupported ways
stand_ins                        full-size placeholders for split tensors and `PerRank` values
stages                           one common tree for ranks with different tensors (pipeline stages)

accelerator                      CUDA, ROCm or XPU, as torch reports it
drill_notes, value_crc           notes for `holdfast drill`: batches, and counters on modules; CRC-32 of a batch
data_place                       the place in the data, now and at the last checkpoint
skippable                        values that can skip batches after `holdfast rewind`
"""
