"""Trackers: the numbers, texts and pictures of a run in CSV, TensorBoard, Weights & Biases, MLflow and sinks of other packages.

``csv`` and ``tensorboard`` write synchronously inside the run folder. ``wandb`` (offline unless ``WANDB_MODE`` is set),
``mlflow`` (a database in the run folder unless ``MLFLOW_TRACKING_URI`` is set) and sinks of other packages (entry-point
group ``unisono.sinks``) run on a thread of their own behind a queue, because their calls may be slow or hang. The event log
detaches a sink that fails, and training continues.

After any number of restarts each built-in sink has one value of a name at a step. CSV and TensorBoard can take values back: of a
step that is made again they have the newest. W&B and MLflow cannot: they keep the first.
"""
