"""A training harness for image classifiers in which the device never waits for data, and the user can see it.

The rooms, in the order in which the data walks through them::

    storage - decode - augment | order - load - pin - copy - normalise | step - evaluate - save
    '--------- data/ ---------'  '------------- feed/ -------------'    '----- training/ -----'
                             ^ settings                   | is told about waits
                          tuning/                       watch/  ->  TensorBoard, report.json, the console

Who may import whom, kept by import-linter (a lower line never imports a higher one, neighbours never each other)::

    train.py            composes the settings, starts the jobs, tells every error
    job                 wires the rooms: main_worker is one rank of a run
    diagnose | page     runs that tell what bounds training | the page that shows a run, as a file and in TensorBoard
    tuning | training   measure and choose loader settings | step, epoch, evaluation, checkpoint
    feed                which sample comes next, samples to batches, batches to the device
    data                where samples lie, bytes to pixels, pixels to a training image
    watch               where the time went, the GPU and the host, what is written about it
    runtime             ranks, randomness, signals, limits, files, the run's folder, the ways to end
    config              every setting; with answers and train.py the only module that knows Hydra
    answers             what the command line answers to what was mistyped

Tuning knows the step by a protocol (``harness.tuning.figures.Trainee``), which training satisfies and job passes on.

For a loop of your own: ``harness.feed.prefetcher.DataPrefetcher``, ``harness.watch.clock.StepClock`` and
``harness.tuning.library.tune``.
"""
