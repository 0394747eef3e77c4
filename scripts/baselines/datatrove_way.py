"""How datatrove goes about it: ParquetReader, DocumentTokenizer, one task a file, on processes or on Ray.

``python datatrove_way.py TOKENIZER.json(HF) OUT PROCESSES FILE…``, with DATATROVE_EXECUTOR=local or ray; the files are
all those of one folder. Prints: text bytes, seconds without imports (and without starting Ray).
"""

import os
import sys
import time
from pathlib import Path

import pyarrow.compute as pc
import pyarrow.parquet as pq
from datatrove.pipeline.readers import ParquetReader
from datatrove.pipeline.tokens import DocumentTokenizer

os.environ["TOKENIZERS_PARALLELISM"] = "false"


def main() -> None:
    """Runs the pipeline with as many tasks as there are files."""
    tokenizer_json, out, processes, files = sys.argv[1], sys.argv[2], int(sys.argv[3]), sys.argv[4:]
    folder = str(Path(files[0]).parent)
    pipeline = [
        ParquetReader(folder, glob_pattern="*.parquet", text_key="text"),
        DocumentTokenizer(
            out,
            tokenizer_name_or_path=tokenizer_json,
            eos_token="<|eos|>",
            shuffle_documents=False,
            save_filename="text",
        ),
    ]
    common = {"pipeline": pipeline, "tasks": len(files), "workers": processes, "logging_dir": f"{out}-log"}
    if os.environ.get("DATATROVE_EXECUTOR") == "ray":
        import ray
        from datatrove.executor import RayPipelineExecutor

        ray.init(address="local", num_cpus=processes, include_dashboard=False, log_to_driver=False)
        executor = RayPipelineExecutor(**common)
    else:
        from datatrove.executor import LocalPipelineExecutor

        executor = LocalPipelineExecutor(**common)
    started = time.perf_counter()
    executor.run()
    seconds = time.perf_counter() - started
    text_bytes = sum(
        pc.sum(pc.binary_length(pq.read_table(file, columns=["text"]).column(0).cast("binary"))).as_py()
        for file in files
    )
    print(text_bytes, seconds)


if __name__ == "__main__":
    main()
