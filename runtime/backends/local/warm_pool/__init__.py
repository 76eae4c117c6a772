"""The warm pool: processes that are kept ready so that runs start at once. If they do not answer, a run starts cold.

A *daemon*, one for each root folder of runs, forks the supervisors of new runs. It keeps one *fork server* for each
image (`runtime.launcher.warm.forkserver`): an interpreter that has imported the image's frameworks and forks ranks.
"""
