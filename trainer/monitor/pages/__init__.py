"""The page of a run, and of one node: figures, curves, rounds and stages in a browser, live, for reading only.

`python -m trainer dashboard` and `monitor --port` show a run by it, and each node, worker and driver shows itself, at
``/`` of its interface ("Global LLM Status", spec O-4). One page, one model (`PageView`), two sources: what a monitor
sees from outside, and what a node knows of itself. What a source cannot know is null, and not shown.

    view    run_page.py (of a monitor), node_page.py (of a node)  →  PageView, as JSON at /api/page
    curves  node_history.py (a node's sqlite file), a monitor's history  →  course.py, down-sampled, at /api/page/course
    page    routes.py: HTML with the first figures in it, modules and styles as files of this package

Guarantees: nothing here changes anything, or waits in the training thread (1.2 µs a step); memory and disk are bounded
however long a run is; an answer has at most 2,000 points a curve and strings of bounded length, and never NaN; the
page runs no script but its own files and plotly's, and asks nobody but where it came from.

Charts are plotly's (the extra ``page``), of which one file of 5 MB is served. It was chosen over bokeh, since its lines
and bars need no eval and no style attribute, so that they run under ``script-src 'self'; style-src 'self'``, and it has
zoom, hover and a legend; it costs a browser a second, which the figures and tables do not wait for. Without it the page
has tables only.
"""
