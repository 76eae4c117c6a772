"""The warm pool: processes kept ready so that runs start at once. If they do not answer, a run starts cold.

A *daemon*, one for each folder of runs, forks the supervisors of new runs. It keeps one *fork server* for each image
(`runtime.launcher.warm.forkserver`), an interpreter with the image's frameworks imported, which forks the ranks.
"""
