"""Training runs and exports in files. The way of the data, and the files in which it meets them:

save    `run_parts` names models, optimizers and objects -> `save` collects JSON (`json_codec`) and pieces of
        tensors (`disk_layout`, `optimizer_state`) -> each rank writes its file (`safetensors_file`) ->
        rank 0 writes the `manifest` and renames the `directory`
load    the newest intact checkpoint of a `directory` -> `restore` compares it with the run, and plans what to copy ->
        copies from the files into pieces (`manifest`, `safetensors_file`)
export  `disk_layout` says which ranges of parameters each tensor of Hugging Face's files consists of -> `export`:
        each rank writes its ranges of the same files, and reads such files
FSDP2   `dcp` converts from and to the files of torch.distributed.checkpoint
"""
